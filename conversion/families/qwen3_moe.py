"""Qwen3-MoE: 30B-A3B, 235B-A22B. Attention of Qwen3, experts without shared expert; some layers may be dense."""

from __future__ import annotations

from jetrl_conversion.families import rows
from jetrl_conversion.families.rows import Row

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
QK_NORM = True


def qkv_bias(config: dict) -> bool:
    return bool(config.get("attention_bias", False))


def is_moe_layer(config: dict, layer: int) -> bool:
    """The rule of transformers and vLLM: every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step = config.get("decoder_sparse_step", 1)
    return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % step == 0


def table(config: dict) -> list[Row]:
    biases = rows.qkv_bias() + rows.o_bias(vllm=False) if qkv_bias(config) else []
    return [rows.EMBED, rows.INPUT_NORM, rows.MLP_NORM, rows.MOE_NORM, *rows.attention(), *biases, *rows.qk_norms(),
            *rows.dense_mlp(), *rows.experts(), rows.FINAL_NORM, rows.LM_HEAD]  # fmt: skip
