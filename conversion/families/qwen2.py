"""Qwen2 and Qwen2.5: bias on q, k and v always, none on the output projection; tied up to 3B."""

from __future__ import annotations

from jetrl_conversion.families import rows
from jetrl_conversion.families.rows import Row

ARCHITECTURES = ("Qwen2ForCausalLM",)
QK_NORM = False


def qkv_bias(config: dict) -> bool:
    return True


def table(config: dict) -> list[Row]:
    return [rows.EMBED, rows.INPUT_NORM, rows.MLP_NORM, *rows.attention(), *rows.qkv_bias(), *rows.dense_mlp(),
            rows.FINAL_NORM, rows.LM_HEAD]  # fmt: skip
