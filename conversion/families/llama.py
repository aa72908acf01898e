"""Llama 3, 3.1, 3.2: no biases unless config.json says so, scaled rope, tied at 1B and 3B."""

from __future__ import annotations

from jetrl_conversion.families import rows
from jetrl_conversion.families.rows import Row

ARCHITECTURES = ("LlamaForCausalLM",)
QK_NORM = False


def qkv_bias(config: dict) -> bool:
    return bool(config.get("attention_bias", False))


def table(config: dict) -> list[Row]:
    biases = rows.qkv_bias() + rows.o_bias(vllm=True) if qkv_bias(config) else []
    mlp = rows.dense_mlp(bias=bool(config.get("mlp_bias", False)))
    return [rows.EMBED, rows.INPUT_NORM, rows.MLP_NORM, *rows.attention(), *biases, *mlp, rows.FINAL_NORM, rows.LM_HEAD]
