"""Why a model cannot be built in a layout at all: divisions that the engines themselves refuse."""

from __future__ import annotations

from collections.abc import Iterator

from jetrl_conversion.model_spec import ModelSpec, Rule, pattern
from jetrl_conversion.parallel import Layout, padded_vocab


def find_problems(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yields (Hugging Face name with `*`, reason), one for every tensor that cannot be placed."""
    if layout.kind == "hf":
        return
    if spec.num_layers % layout.pp:
        yield "model.layers.*", f"{spec.num_layers} layers do not divide by pp = {layout.pp}"
    if layout.ep > 1 and not spec.num_experts:
        yield "model.layers.*.mlp", f"ep = {layout.ep}, but the model has no experts"
    if spec.num_experts % layout.ep:
        yield "model.layers.*.mlp.experts.*", f"{spec.num_experts} experts do not divide by ep = {layout.ep}"
    for rule in spec.rules():
        reason = _reason(spec, rule, layout)
        if reason:
            yield pattern(rule), reason


def _reason(spec: ModelSpec, rule: Rule, layout: Layout) -> str | None:
    if layout.kind == "vllm" and rule.row.vllm is None:
        return "vLLM's model has no such parameter"
    if layout.kind == "megatron" and rule.row.hf.endswith("o_proj.bias") and not _has_mlp_bias(spec):
        return "Megatron-core has a bias here only together with MLP biases"
    split, experts = rule.row.split, rule.experts > 1
    count, which = (layout.expert_tp, "expert tp") if experts else (layout.tp, "tp")
    if count == 1:
        return None
    if split == "qkv" or rule.row.hf.endswith("self_attn.o_proj.weight"):
        heads, kv = spec.num_heads, spec.num_kv_heads
        if heads % count:
            return f"{heads} attention heads do not divide by {which} = {count}"
        if rule.row.part > 0 and kv % count and count % kv:
            return f"{kv} KV heads neither divide by {which} = {count} nor {count} by {kv}"
        if layout.kind == "megatron" and split == "qkv" and (spec.q_rows + 2 * spec.kv_rows) % count:
            return f"{spec.q_rows + 2 * spec.kv_rows} fused QKV rows do not divide by {which} = {count}"
    elif split == "rows" and rule.rows % count:
        return f"{rule.rows} rows do not divide by {which} = {count}"
    elif split == "cols" and rule.cols % count:
        return f"{rule.cols} columns do not divide by {which} = {count}"
    elif split == "vocab" and padded_vocab(spec, layout) % count:
        return f"{padded_vocab(spec, layout)} padded vocabulary rows do not divide by {which} = {count}"
    return None


def _has_mlp_bias(spec: ModelSpec) -> bool:
    return any(rule.row.hf.endswith("down_proj.bias") for rule in spec.rules())
