"""Qwen2.5-7B on one H100 node: in the paper it does not converge with BF16 training and FP8 rollout."""

from __future__ import annotations

from jetrl_megatron.config import Config, ParallelConfig
from jetrl_recipes.cluster import deepmath, math, on_h100
from jetrl_recipes.registry import recipe


def _7b(answer: int) -> Config:
    return on_h100(
        "Qwen2.5-7B",
        answer=answer,
        data=math() if answer <= 8192 else deepmath(),
        parallel=ParallelConfig(tp=4, dp=2, sequence_parallel=True),
        rollout_tp=1,
        utilization=0.6,
    )


@recipe()
def qwen25_7b_8k() -> Config:
    config = _7b(8192)
    config.purpose = "MATH, answers to 8K tokens: with QKV biases, and 4 KV heads"
    return config


@recipe()
def qwen25_7b_16k() -> Config:
    config = _7b(16384)
    config.purpose = "DeepMath, answers to 16K tokens"
    return config
