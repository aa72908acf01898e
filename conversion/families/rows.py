"""The vocabulary in which a family's table is written, and the rows that most decoder families share.

A `Row` says, for one Hugging Face tensor of a decoder layer (or of the whole model), its shape, how tensor parallelism
cuts it, and where it lives in Megatron-core's GPTModel and in vLLM's model. Shapes are symbols so that one table serves
every size:

    h hidden   q query rows (heads * head_dim)   k key/value rows (kv_heads * head_dim)   d head_dim
    f dense ffn   m ffn of one expert   x number of experts   v vocabulary

Cuts (`split`):
    copy   every tensor-parallel rank holds all of it (norms, router, bias of a row-parallel layer)
    vocab  rows over ranks, after padding the vocabulary
    qkv    rows over ranks by attention head; `part` 0, 1, 2 = query, key, value of one fused tensor
    rows   rows over ranks; `part` of `parts` says its place in a fused tensor (gate 0, up 1)
    cols   columns over ranks (row-parallel layers)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Split = Literal["copy", "vocab", "qkv", "rows", "cols"]
Where = Literal["model", "layer", "dense", "moe"]


@dataclass(frozen=True)
class Row:
    """One line of a family's table. `{layer}` and `{expert}` in names are indexes; Megatron's are local to the rank."""

    hf: str
    shape: str
    split: Split
    megatron: str
    vllm: str | None
    part: int = 0
    parts: int = 1
    where: Where = "layer"
    megatron_te: str | None = None
    """Name under Transformer Engine's layer spec, where it differs from the local spec."""
    megatron_grouped: str | None = None
    """Name under TEGroupedMLP (experts only)."""


QUANTIZED_SUFFIXES = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
)


def is_quantized(hf_name: str) -> bool:
    """Whether the tensor of this Hugging Face name is stored in FP8. The only such rule in the repository.

    Linear weights of attention, MLP and experts are; embedding, lm_head, router, norms and biases are not.
    """
    return hf_name.startswith("model.layers.") and hf_name.endswith(QUANTIZED_SUFFIXES)


_HF = "model.layers.{layer}."
_MG = "decoder.layers.{layer}."
_FC1, _FC2 = _MG + "mlp.linear_fc1.", _MG + "mlp.linear_fc2."
_QKV_MG, _QKV_VL = _MG + "self_attention.linear_qkv.", _HF + "self_attn.qkv_proj."
_EXPERT_MG = _MG + "mlp.experts.local_experts.{expert}."
_EXPERT_VL = _HF + "mlp.experts.routed_experts."

EMBED = Row("model.embed_tokens.weight", "vh", "vocab", "embedding.word_embeddings.weight", "model.embed_tokens.weight",
            where="model")  # fmt: skip
FINAL_NORM = Row("model.norm.weight", "h", "copy", "decoder.final_layernorm.weight", "model.norm.weight", where="model")
LM_HEAD = Row("lm_head.weight", "vh", "vocab", "output_layer.weight", "lm_head.weight", where="model")


INPUT_NORM = Row(_HF + "input_layernorm.weight", "h", "copy", _MG + "input_layernorm.weight",
                 _HF + "input_layernorm.weight", megatron_te=_QKV_MG + "layer_norm_weight")  # fmt: skip
MLP_NORM = Row(_HF + "post_attention_layernorm.weight", "h", "copy", _MG + "pre_mlp_layernorm.weight",
               _HF + "post_attention_layernorm.weight", megatron_te=_FC1 + "layer_norm_weight",
               where="dense")  # fmt: skip
# Before experts TE keeps the norm as a module of its own.
MOE_NORM = replace(MLP_NORM, megatron_te=None, where="moe")


def attention() -> list[Row]:
    """Query, key, value (fused in both engines) and output projections."""
    return [
        Row(_HF + "self_attn.q_proj.weight", "qh", "qkv", _QKV_MG + "weight", _QKV_VL + "weight", part=0, parts=3),
        Row(_HF + "self_attn.k_proj.weight", "kh", "qkv", _QKV_MG + "weight", _QKV_VL + "weight", part=1, parts=3),
        Row(_HF + "self_attn.v_proj.weight", "kh", "qkv", _QKV_MG + "weight", _QKV_VL + "weight", part=2, parts=3),
        Row(_HF + "self_attn.o_proj.weight", "hq", "cols", _MG + "self_attention.linear_proj.weight",
            _HF + "self_attn.o_proj.weight"),
    ]  # fmt: skip


def qkv_bias() -> list[Row]:
    return [
        Row(_HF + "self_attn.q_proj.bias", "q", "qkv", _QKV_MG + "bias", _QKV_VL + "bias", part=0, parts=3),
        Row(_HF + "self_attn.k_proj.bias", "k", "qkv", _QKV_MG + "bias", _QKV_VL + "bias", part=1, parts=3),
        Row(_HF + "self_attn.v_proj.bias", "k", "qkv", _QKV_MG + "bias", _QKV_VL + "bias", part=2, parts=3),
    ]


def o_bias(*, vllm: bool) -> list[Row]:
    """Bias of the output projection. vLLM's Qwen models have no parameter for it (`vllm=False`)."""
    name = _HF + "self_attn.o_proj.bias"
    return [Row(name, "h", "copy", _MG + "self_attention.linear_proj.bias", name if vllm else None)]


def qk_norms() -> list[Row]:
    """Per-head RMSNorm of queries and keys (Qwen3)."""
    return [
        Row(_HF + "self_attn.q_norm.weight", "d", "copy", _MG + "self_attention.q_layernorm.weight",
            _HF + "self_attn.q_norm.weight"),
        Row(_HF + "self_attn.k_norm.weight", "d", "copy", _MG + "self_attention.k_layernorm.weight",
            _HF + "self_attn.k_norm.weight"),
    ]  # fmt: skip


def dense_mlp(*, bias: bool = False) -> list[Row]:
    """Gate and up (fused, gate first) and down projections."""
    gate_up = _HF + "mlp.gate_up_proj."
    rows = [
        Row(_HF + "mlp.gate_proj.weight", "fh", "rows", _FC1 + "weight", gate_up + "weight", part=0, parts=2,
            where="dense"),
        Row(_HF + "mlp.up_proj.weight", "fh", "rows", _FC1 + "weight", gate_up + "weight", part=1, parts=2,
            where="dense"),
        Row(_HF + "mlp.down_proj.weight", "hf", "cols", _FC2 + "weight", _HF + "mlp.down_proj.weight", where="dense"),
    ]  # fmt: skip
    if bias:
        rows += [
            Row(_HF + "mlp.gate_proj.bias", "f", "rows", _FC1 + "bias", gate_up + "bias", part=0, parts=2,
                where="dense"),
            Row(_HF + "mlp.up_proj.bias", "f", "rows", _FC1 + "bias", gate_up + "bias", part=1, parts=2,
                where="dense"),
            Row(_HF + "mlp.down_proj.bias", "h", "copy", _FC2 + "bias", _HF + "mlp.down_proj.bias", where="dense"),
        ]  # fmt: skip
    return rows


def experts() -> list[Row]:
    """Router and experts. vLLM stacks the experts of a rank: w13 [experts, 2 * m, h] (gate, up), w2 [experts, h, m]."""
    hf = _HF + "mlp.experts.{expert}."
    grouped = _MG + "mlp.experts.linear_fc{}.weight"
    return [
        Row(_HF + "mlp.gate.weight", "xh", "copy", _MG + "mlp.router.weight", _HF + "mlp.gate.weight", where="moe"),
        Row(hf + "gate_proj.weight", "mh", "rows", _EXPERT_MG + "linear_fc1.weight", _EXPERT_VL + "w13_weight",
            part=0, parts=2, where="moe", megatron_grouped=grouped.replace("{}", "1") + "{expert}"),
        Row(hf + "up_proj.weight", "mh", "rows", _EXPERT_MG + "linear_fc1.weight", _EXPERT_VL + "w13_weight",
            part=1, parts=2, where="moe", megatron_grouped=grouped.replace("{}", "1") + "{expert}"),
        Row(hf + "down_proj.weight", "hm", "cols", _EXPERT_MG + "linear_fc2.weight", _EXPERT_VL + "w2_weight",
            where="moe", megatron_grouped=grouped.replace("{}", "2") + "{expert}"),
    ]  # fmt: skip
