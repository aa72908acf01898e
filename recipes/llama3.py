"""Llama-3.1-8B on one H100 node: 49.0 in BF16 and 20.6 with mixed precision on GSM8K in the paper."""

from __future__ import annotations

from jetrl_megatron.config import Config, ParallelConfig
from jetrl_recipes.cluster import gsm8k, math, on_h100
from jetrl_recipes.registry import recipe


def _8b(answer: int) -> Config:
    config = on_h100(
        "Llama-3.1-8B",
        answer=answer,
        data=gsm8k() if answer <= 8192 else math(),
        parallel=ParallelConfig(tp=4, dp=2, sequence_parallel=True),
        rollout_tp=1,
        utilization=0.6,
    )
    config.data.chat_template = False  # the base model's tokenizer has none
    return config


@recipe()
def llama31_8b_8k() -> Config:
    config = _8b(8192)
    config.purpose = "GSM8K, answers to 8K tokens: the paper's largest loss of mixed precision"
    return config


@recipe()
def llama31_8b_16k() -> Config:
    config = _8b(16384)
    config.purpose = "MATH, answers to 16K tokens"
    return config
