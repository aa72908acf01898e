"""Megatron's names for a model inside a distributed checkpoint, whatever the parallel sizes it was saved with.

GPTModel.sharded_state_dict stacks the layers: `decoder.layers.self_attention.linear_qkv.weight` is [layers, rows,
cols], experts are [layers, experts, rows, cols], and rows lie as on one rank (QKV interleaved per KV group, gate then
up). Where dense and expert layers mix, keys carry the layer's global index instead. Norms are named as Transformer
Engine fuses them; the local spec is mapped to the same names, but before experts the two differ: both are written.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from jetrl_conversion.layout import blocks
from jetrl_conversion.model_spec import ModelSpec, Rule
from jetrl_conversion.parallel import Layout

ONE_RANK = Layout("megatron")


class Key(NamedTuple):
    """A stored tensor: dimensions `lead` (layers, experts), then rows x cols, filled by the tensors of `rules`."""

    name: str
    aliases: tuple[str, ...]
    lead: tuple[int, ...]
    rows: int
    cols: int
    ndim: int
    rules: tuple[Rule, ...]
    layers: tuple[int | None, ...]
    stacked: bool
    """Whether the first of the leading dimensions counts layers."""

    def at(self, layer: int | None, expert: int) -> tuple[int, ...]:
        """Position along the leading dimensions."""
        return ((layer or 0,) if self.stacked else ()) + ((expert,) if self.rules[0].experts > 1 else ())

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.rows, self.cols) if self.ndim == 2 else (*self.lead, self.rows)


def stored_keys(spec: ModelSpec) -> list[Key]:
    """Every stored tensor of the model, in the order of the family's table."""
    return list(_stored_keys(spec))


def extra_state_keys(spec: ModelSpec) -> list[str]:
    """Keys of the empty `_extra_state` objects that Megatron's linear layers save and expect to find."""
    found = []
    for key in _stored_keys(spec):
        module, _, kind = key.name.rpartition(".")
        if kind != "weight" or not module.rpartition(".")[2].startswith("linear_"):
            continue
        if not key.lead:
            found.append(f"{module}._extra_state/shard_0_1")
        for index in range(_volume(key.lead) if key.lead else 0):
            at, dims = _unravel(index, key.lead), ".".join(map(str, key.lead))
            found.append(f"{module}._extra_state/shard_{'.'.join(map(str, at))}_{dims}")
    return found


def _volume(lead: tuple[int, ...]) -> int:
    total = 1
    for n in lead:
        total *= n
    return total


def _unravel(index: int, lead: tuple[int, ...]) -> list[int]:
    at = []
    for n in reversed(lead):
        index, rest = divmod(index, n)
        at.append(rest)
    return at[::-1]


@functools.lru_cache(maxsize=16)
def _stored_keys(spec: ModelSpec) -> tuple[Key, ...]:
    mixed = 0 < len(spec.moe_layers) < spec.num_layers
    fused: dict[tuple[str, str], list[Rule]] = {}
    for rule in spec.rules():
        fused.setdefault((rule.row.megatron, rule.row.where), []).append(rule)
    keys = []
    for rules in fused.values():
        first = rules[0]
        rows = sum(rule.rows for rule in rules)
        for layers in [(layer,) for layer in spec.layers(first)] if mixed else [spec.layers(first)]:
            names = _names(first, layers[0] if mixed else None)
            stacked = layers != (None,) and not mixed
            lead = (spec.num_layers,) if stacked else ()
            lead += (first.experts,) if first.experts > 1 else ()
            keys.append(
                Key(names[0], tuple(names[1:]), lead, rows, first.cols, first.ndim, tuple(rules), layers, stacked)
            )
    return tuple(keys)


def _names(rule: Rule, layer: int | None) -> list[str]:
    """The key, then other names under which the same tensor is found."""
    local, te = rule.row.megatron, rule.row.megatron_te
    names = [te or local]
    if te:
        names.append(local)
    elif local.endswith("pre_mlp_layernorm.weight"):  # before experts: TE keeps the name, the local spec maps it
        names.append(local.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"))
    at = "decoder.layers." if layer is None else f"decoder.layers.{layer}."
    return [n.replace("decoder.layers.{layer}.", at).replace("local_experts.{expert}", "experts") for n in names]


class Source(NamedTuple):
    """A run of rows of a Hugging Face tensor and where it lies in the stored tensor."""

    row: int
    rows: int
    stored_row: int


@functools.lru_cache(maxsize=1024)
def rows_in(spec: ModelSpec, rule: Rule) -> tuple[Source, ...]:
    """How the rows of one Hugging Face tensor lie in its stored tensor."""
    return tuple(Source(b.row, b.rows, b.local_row) for b in blocks(spec, rule, ONE_RANK, 0))
