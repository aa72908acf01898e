"""Qwen3, dense: the paper's 8B-Base and 32B on H100 nodes, and small ones for two GPUs."""

from __future__ import annotations

from jetrl_megatron.config import Config, ParallelConfig
from jetrl_recipes.cluster import deepmath, gsm8k, math, on_h100
from jetrl_recipes.registry import as_it_is, recipe


def _8b(answer: int) -> Config:
    return on_h100(
        "Qwen3-8B-Base",
        answer=answer,
        data=math() if answer <= 8192 else deepmath(),
        parallel=ParallelConfig(tp=4, dp=2, sequence_parallel=True),
        rollout_tp=1,
        utilization=0.6,
    )


def _stages(config: Config) -> None:
    """Exact parity wants whole layers on a GPU, as the engine has them: pipeline stages instead of tensor parallel."""
    config.parallel = ParallelConfig(pp=2, dp=4)
    config.model.recompute, config.rollout.gpu_memory_utilization = True, 0.4


@recipe(exact=_stages)
def qwen3_8b_base_8k() -> Config:
    config = _8b(8192)
    config.purpose = "MATH, answers to 8K tokens: the paper's dense 8B model on one node"
    return config


@recipe(exact=_stages)
def qwen3_8b_base_16k() -> Config:
    config = _8b(16384)
    config.purpose = "DeepMath, answers to 16K tokens: where BF16 training with FP8 rollout collapses in the paper"
    return config


def _32b(answer: int) -> Config:
    return on_h100(
        "Qwen3-32B",
        answer=answer,
        data=math() if answer <= 8192 else deepmath(),
        parallel=ParallelConfig(tp=8, pp=2, dp=2, nodes=4, sequence_parallel=True),
        rollout_tp=4,
        utilization=0.6,
    )


@recipe()
def qwen3_32b_8k() -> Config:
    config = _32b(8192)
    config.purpose = "MATH, answers to 8K tokens, four nodes: where FP8 rollout gains most"
    return config


@recipe()
def qwen3_32b_16k() -> Config:
    config = _32b(16384)
    config.purpose = "DeepMath, answers to 16K tokens, four nodes"
    return config


@recipe(exact=as_it_is)
def qwen3_0_6b_2gpu() -> Config:
    config = on_h100(
        "Qwen3-0.6B",
        answer=2048,
        data=gsm8k(),
        parallel=ParallelConfig(dp=2),
        rollout_tp=1,
        utilization=0.5,
    )
    config.purpose = "GSM8K on two GPUs: try a cluster in an hour"
    config.grpo.prompts_per_step, config.grpo.group_size = 32, 8
    config.train.micro_batch_size = 4
    return config


@recipe()
def qwen3_1_7b_2gpu_tp2() -> Config:
    config = on_h100(
        "Qwen3-1.7B",
        answer=4096,
        data=gsm8k(),
        parallel=ParallelConfig(tp=2, sequence_parallel=True),
        rollout_tp=1,
        utilization=0.5,
    )
    config.purpose = "GSM8K on two GPUs, trainer at TP=2 and engines at TP=1: the refit reshards"
    config.grpo.prompts_per_step, config.grpo.group_size = 32, 8
    config.train.micro_batch_size = 2
    return config
