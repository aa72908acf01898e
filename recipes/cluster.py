"""What the recipes for H100 nodes (8 GPUs each) share: optimizer, group sizes, answer lengths, data sets.

From the paper (arXiv 2601.14243): models, 8K and 16K answers, GSM8K, MATH and DeepMath. Its other settings are not
known here; learning rate, clipping and batch are the usual ones of GRPO on these models.
"""

from __future__ import annotations

from jetrl_megatron.config import (
    Config,
    DataConfig,
    GRPOConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)

PROMPT = 1024
"""Tokens left for the prompt beside the longest answer."""


def gsm8k() -> DataConfig:
    return DataConfig(name="openai/gsm8k", options={"name": "main"}, eval_size=1319, chat_template=True)


def math() -> DataConfig:
    return DataConfig(
        name="DigitalLearningGmbH/MATH-lighteval",
        question_field="problem",
        answer_field="solution",
        eval_size=500,
        chat_template=True,
    )


def deepmath() -> DataConfig:
    """Has no test split: one question in eight is held out, by the hash of its text."""
    return DataConfig(
        name="zwhe99/DeepMath-103K",
        answer_field="final_answer",
        eval_size=500,
        chat_template=True,
    )


def on_h100(
    model: str, *, answer: int, data: DataConfig, parallel: ParallelConfig, rollout_tp: int, utilization: float
) -> Config:
    """GRPO on whole H100 nodes, engines on the trainers' GPUs, on every node.

    Args:
        model: name of the released model; expected in models/ of the repository (a link to the site's folder will do).
        answer: longest answer, in tokens.
        utilization: share of a GPU's memory that the engine takes while it samples.
    """
    return Config(
        model=ModelConfig(path=f"models/{model}", max_length=PROMPT + answer, recompute=answer > 8192),
        parallel=parallel,
        rollout=RolloutConfig(
            tp=rollout_tp,
            replicas=parallel.world_size // rollout_tp,
            max_response_tokens=answer,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=utilization,
            start_timeout_s=1800.0,
            call_timeout_s=7200.0,
        ),
        grpo=GRPOConfig(prompts_per_step=64, group_size=8),
        optimizer=OptimizerConfig(lr=1e-6, warmup_steps=10),
        data=data,
        train=TrainConfig(steps=200, micro_batch_size=1, eval_every=20, timeout_s=1800.0, device="cuda"),
    )
