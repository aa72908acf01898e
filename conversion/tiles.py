"""Which tensors can travel as FP8 bytes between given layouts, and why the others cannot.

The 128 x 128 grid is that of the Hugging Face tensor. A layout may hold a tensor in FP8 only if each of its rectangles
starts and ends on the grid (or at the tensor's own edge) both in the Hugging Face tensor and in the local parameter:
otherwise two scales would fall into one local tile. Tensors that an engine fuses into one parameter (or, for experts,
into one module) share one fate, because a layer has one quantization method.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable
from typing import NamedTuple

from jetrl_conversion.errors import ConversionError
from jetrl_conversion.layout import blocks, problems, stacked_rows
from jetrl_conversion.model_spec import ModelSpec, Rule, hf_name, pattern
from jetrl_conversion.parallel import Layout, shard_count
from jetrl_kernels.formats import BLOCK


class Violation(NamedTuple):
    """A tensor (name with `*` for layer and expert) that a layout cannot hold as FP8 tiles, or not at all (`fatal`)."""

    hf_name: str
    layout: str
    reason: str
    fatal: bool

    def __str__(self) -> str:
        fate = "cannot be built" if self.fatal else "kept BF16"
        return f"{self.hf_name}: {fate} in {self.layout}: {self.reason}"


def violations(spec: ModelSpec, *layouts: Layout) -> list[Violation]:
    """Every tensor that any of the layouts cannot hold, with the reason; impossible layouts (`fatal`) first."""
    found: list[Violation] = []
    for layout in dict.fromkeys(layouts):
        fatal = problems(spec, layout)
        found += [Violation(name, str(layout), reason, True) for name, reason in fatal]
        broken = {name for name, _ in fatal}
        for rule, reason in _broken_rules(spec, layout).items():
            if pattern(rule) not in broken:
                found.append(Violation(pattern(rule), str(layout), reason, False))
    return sorted(found, key=lambda v: not v.fatal)


def quantized_layers(
    spec: ModelSpec, *layouts: Layout, keep_bf16: Iterable[str] = ()
) -> dict[Rule, frozenset[int | None]]:
    """Rule -> layers in which its tensor is FP8 when a model moves between `layouts`; rules never in FP8 are absent.

    `keep_bf16`: glob patterns over full Hugging Face names (`model.layers.0.*`, `*.down_proj.weight`). What is fused
    with a match in the same layer stays BF16 too.

    Raises:
        ConversionError: patterns that match no tensor.
    """
    keep = list(keep_bf16)
    names = spec.tensors() if keep else {}
    unmatched = [want for want in keep if not any(fnmatch.fnmatchcase(name, want) for name in names)]
    if unmatched:
        raise ConversionError([f"--keep-bf16 {want!r} matches no tensor of the model" for want in unmatched])
    broken = {rule for layout in layouts for rule in _broken_rules(spec, layout)}
    found = {}
    for group in _groups(spec):
        layers = frozenset(layer for layer in spec.layers(group[0]) if not (keep and _kept(group, layer, keep)))
        found.update({rule: layers for rule in group if rule not in broken and layers})
    return found


def quantized_tensors(spec: ModelSpec, *layouts: Layout, keep_bf16: Iterable[str] = ()) -> set[str]:
    """Hugging Face names stored in FP8 on both sides, when a model moves between `layouts`: see `quantized_layers`."""
    found = quantized_layers(spec, *layouts, keep_bf16=keep_bf16)
    return {hf_name(rule, layer, e) for rule, layers in found.items() for layer in layers for e in range(rule.experts)}


def _kept(group: tuple[Rule, ...], layer: int | None, keep: list[str]) -> bool:
    members = (hf_name(rule, layer, expert) for rule in group for expert in range(rule.experts))
    return any(fnmatch.fnmatchcase(name, want) for name in members for want in keep)


@functools.lru_cache(maxsize=64)
def _groups(spec: ModelSpec) -> tuple[tuple[Rule, ...], ...]:
    """Quantized rules that share one fate: what Megatron or vLLM fuses, and all matrices of the experts."""
    groups: dict[str, list[Rule]] = {}
    for rule in spec.rules():
        if rule.quantized:
            groups.setdefault("experts" if rule.experts > 1 else rule.row.megatron, []).append(rule)
    return tuple(tuple(group) for group in groups.values())


@functools.lru_cache(maxsize=512)
def _broken_rules(spec: ModelSpec, layout: Layout) -> dict[Rule, str]:
    """Rule -> why it stays BF16 in this layout. Rules that cannot be placed at all are left to `problems`."""
    impossible = {name for name, _ in problems(spec, layout)}
    broken: dict[Rule, str] = {}
    for group in _groups(spec):
        reasons = {rule: _tile_reason(spec, rule, layout) for rule in group if pattern(rule) not in impossible}
        own = {rule: reason for rule, reason in reasons.items() if reason}
        for rule in reasons:
            if own:
                culprit = next(iter(own))
                broken[rule] = own.get(rule) or f"fused with {pattern(culprit)}: {own[culprit]}"
    return broken


def _tile_reason(spec: ModelSpec, rule: Rule, layout: Layout) -> str | None:
    """The first tile that this layout splits or shifts, in words; None if all stay whole."""
    if layout.kind == "hf":
        return None
    count = shard_count(rule, layout)
    if rule.row.split == "rows" and rule.rows // count % BLOCK and (count > 1 or rule.row.parts > 1):
        tile = rule.rows // count // BLOCK
        return (
            f"{rule.rows}/{count} = {rule.rows // count} rows per rank are not a multiple of {BLOCK} (tile row {tile})"
        )
    if rule.row.split == "cols" and rule.cols // count % BLOCK and count > 1:
        tile = rule.cols // count // BLOCK
        return (
            f"{rule.cols}/{count} = {rule.cols // count} columns per rank are not a multiple of {BLOCK} "
            f"(tile column {tile})"
        )
    fused = spec.q_rows + 2 * spec.kv_rows
    if rule.row.split == "qkv" and layout.kind == "megatron" and not spec.head_dim % BLOCK and fused // count % BLOCK:
        return f"{fused}/{count} = {fused // count} fused QKV rows per rank are not a multiple of {BLOCK}"
    for shard in range(count):
        for block in blocks(spec, rule, layout, shard):
            edges = [(block.row, block.rows, rule.rows), (block.col, block.cols, rule.cols)]
            cut = any(
                start % BLOCK or ((start + size) % BLOCK and start + size != whole) for start, size, whole in edges
            )
            shifted = block.local_row % BLOCK or block.local_col % BLOCK
            if cut or shifted:
                end = block.row + block.rows
                tile = (block.row if shifted or block.row % BLOCK else end) // BLOCK
                what = "cut" if cut else f"moved to local row {block.local_row}"
                unit = f"head_dim {spec.head_dim}, " if rule.row.split == "qkv" else ""
                return f"{unit}rows {block.row}..{end - 1} of rank {shard}: tile row {tile} is {what}"
    if rule.experts > 1 and layout.kind == "vllm" and stacked_rows(rule, layout) % BLOCK:
        return f"{stacked_rows(rule, layout)} rows per stacked expert are not a multiple of {BLOCK}"
    return None
