"""What a model is, read from its config.json alone: sizes, options, and every tensor with its shape."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jetrl_conversion.errors import CheckpointError, ConversionError
from jetrl_conversion.families import family_of
from jetrl_conversion.families.rows import Row, is_quantized


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    quantized: bool


class Rule(NamedTuple):
    """A `Row` at this model's sizes: `rows` x `cols` of the Hugging Face tensor (1-D tensors: n x 1)."""

    row: Row
    rows: int
    cols: int
    ndim: int
    quantized: bool
    experts: int
    """Number of experts the row repeats over, 1 if it does not."""


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and options of one model. Hashable; equal configs give equal specs.

    `num_experts` 0 means dense; `moe_ffn` is the width of one expert; `rope_scaling` is None or config.json's dict.
    """

    family: str
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rms_eps: float
    rope_theta: float
    max_positions: int
    num_experts: int
    experts_per_token: int
    moe_ffn: int
    norm_topk_prob: bool
    moe_layers: frozenset[int]
    rope_scaling: dict[str, Any] | None = field(default=None, compare=False)
    config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    config_key: str = field(default="", repr=False)
    """config.json in canonical text: what equality and hashing go by, since dicts do not hash."""

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim

    def rules(self) -> tuple[Rule, ...]:
        """The family's table at this model's sizes; without `lm_head` if tied, without rows that no layer uses."""
        return _rules(self)

    def layers(self, rule: Rule) -> tuple[int | None, ...]:
        """Global indexes of the layers that have this tensor; `(None,)` for a tensor of the whole model."""
        return _layers(self, rule.row.where)

    def tensors(self) -> dict[str, TensorInfo]:
        """Hugging Face name -> shape and whether the format stores it in FP8, in checkpoint order (layer by layer)."""
        return dict(_tensors(self))

    def shape(self, rule: Rule) -> tuple[int, ...]:
        return (rule.rows,) if rule.ndim == 1 else (rule.rows, rule.cols)


def hf_name(rule: Rule, layer: int | None, expert: int = 0) -> str:
    return rule.row.hf.format(layer=layer, expert=expert)


def pattern(rule: Rule) -> str:
    """The rule's Hugging Face name with `*` for layer and expert, as messages and `--keep-bf16` write it."""
    return rule.row.hf.format(layer="*", expert="*")


def load_model_spec(source: str | Path | dict[str, Any]) -> ModelSpec:
    """Read a model folder, a config.json, or a config dict.

    Raises:
        CheckpointError: no config.json, or it is not JSON.
        ConversionError: unknown architecture, or keys missing or not usable (all listed).
    """
    config = source if isinstance(source, dict) else read_config(source)
    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        raise ConversionError(f"config.json: `architectures` must name one architecture, it is {architectures!r}")
    family = family_of(architectures[0])
    return _build(architectures[0], family, config)


def read_config(path: str | Path) -> dict[str, Any]:
    """The dict in `path`/config.json (or in `path` itself, if it is a file)."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; a model folder holds a config.json")
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: holds a {type(config).__name__}, not an object")
    return config


def _build(architecture: str, family: ModuleType, config: dict[str, Any]) -> ModelSpec:
    problems: list[str] = []

    def integer(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            problems.append(f"config.json: {key} must be a positive integer, it is {config.get(key)!r}")
            return 1
        return value

    heads, hidden = integer("num_attention_heads"), integer("hidden_size")
    moe = hasattr(family, "is_moe_layer")
    if moe and "num_experts" not in config and "num_local_experts" in config:  # what transformers 5 writes
        config = config | {"num_experts": config["num_local_experts"]}
    num_layers = integer("num_hidden_layers")
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"}
    kind = scaling.get("rope_type", scaling.get("type", "default")) if scaling else "default"
    spec = ModelSpec(
        family=family.__name__.rsplit(".", 1)[1],
        architecture=architecture,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=integer("num_key_value_heads", heads),
        head_dim=integer("head_dim", max(1, hidden // heads)),
        ffn=integer("intermediate_size"),
        vocab_size=integer("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias(config),
        qk_norm=family.QK_NORM,
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        max_positions=integer("max_position_embeddings", 2048),
        num_experts=integer("num_experts") if moe else 0,
        experts_per_token=integer("num_experts_per_tok") if moe else 0,
        moe_ffn=integer("moe_intermediate_size") if moe else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        moe_layers=frozenset(i for i in range(num_layers) if moe and family.is_moe_layer(config, i)),
        rope_scaling=None if kind == "default" else dict(scaling),
        config=config,
        config_key=json.dumps(config, sort_keys=True),
    )
    if not problems and heads % spec.num_kv_heads:
        problems.append(f"config.json: {heads} attention heads are not a multiple of {spec.num_kv_heads} KV heads")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"config.json: hidden_act {config['hidden_act']!r}; these families use silu")
    if problems:
        raise ConversionError(problems)
    return spec


@functools.lru_cache(maxsize=64)
def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    sizes = {
        "h": spec.hidden_size,
        "q": spec.q_rows,
        "k": spec.kv_rows,
        "d": spec.head_dim,
        "f": spec.ffn,
        "m": spec.moe_ffn,
        "x": spec.num_experts,
        "v": spec.vocab_size,
    }
    rules = []
    for row in family_of(spec.architecture).table(spec.config):
        if not _layers(spec, row.where) or (spec.tied and row.hf == "lm_head.weight"):
            continue
        rows, cols = (sizes[row.shape[0]], sizes[row.shape[1]] if len(row.shape) == 2 else 1)
        experts = spec.num_experts if "{expert}" in row.hf else 1
        quantized = is_quantized(row.hf.format(layer=0, expert=0))
        rules.append(Rule(row, rows, cols, len(row.shape), quantized, experts))
    return tuple(rules)


@functools.lru_cache(maxsize=256)
def _layers(spec: ModelSpec, where: str) -> tuple[int | None, ...]:
    if where == "model":
        return (None,)
    if where == "layer":
        return tuple(range(spec.num_layers))
    return tuple(i for i in range(spec.num_layers) if (i in spec.moe_layers) == (where == "moe"))


@functools.lru_cache(maxsize=8)
def _tensors(spec: ModelSpec) -> dict[str, TensorInfo]:
    rules = spec.rules()
    found = {}
    first = [r for r in rules if r.row.where == "model" and r.row.hf.endswith("embed_tokens.weight")]
    last = [r for r in rules if r.row.where == "model" and r not in first]
    for rule in first:
        found[hf_name(rule, None)] = TensorInfo(spec.shape(rule), rule.quantized)
    for layer in range(spec.num_layers):
        for rule in rules:
            if rule.row.where == "model" or layer not in spec.layers(rule):
                continue
            for expert in range(rule.experts):
                found[hf_name(rule, layer, expert)] = TensorInfo(spec.shape(rule), rule.quantized)
    for rule in last:
        found[hf_name(rule, None)] = TensorInfo(spec.shape(rule), rule.quantized)
    return found
