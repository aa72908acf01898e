"""Qwen3, dense: 0.6B to 32B. No QKV bias unless `attention_bias`, per-head norms of q and k, tied up to 4B."""

from __future__ import annotations

from jetrl_conversion.families import rows
from jetrl_conversion.families.rows import Row

ARCHITECTURES = ("Qwen3ForCausalLM",)
QK_NORM = True


def qkv_bias(config: dict) -> bool:
    return bool(config.get("attention_bias", False))


def table(config: dict) -> list[Row]:
    biases = rows.qkv_bias() + rows.o_bias(vllm=False) if qkv_bias(config) else []
    return [rows.EMBED, rows.INPUT_NORM, rows.MLP_NORM, *rows.attention(), *biases, *rows.qk_norms(), *rows.dense_mlp(),
            rows.FINAL_NORM, rows.LM_HEAD]  # fmt: skip
