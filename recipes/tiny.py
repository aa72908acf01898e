"""Recipes that run on a machine without a GPU: the same program, a model of a million parameters made locally."""

from __future__ import annotations

from jetrl_megatron.config import (
    Config,
    DataConfig,
    GRPOConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)
from jetrl_recipes.registry import as_it_is, recipe


@recipe(exact=as_it_is)
def tiny_cpu() -> Config:
    return Config(
        purpose="spell words backwards on a laptop, in minutes: two trainer ranks and one engine, no GPU",
        model=ModelConfig(max_length=64),
        parallel=ParallelConfig(tp=2),
        rollout=RolloutConfig(max_response_tokens=8),
        grpo=GRPOConfig(reward_truncated=False),
        optimizer=OptimizerConfig(lr=3e-4),
        data=DataConfig(
            name="reasoning_gym:spell_backward",
            options={"min_word_len": 4, "max_word_len": 4},
        ),
        sft=SFTConfig(wrong_share=0.5),
        train=TrainConfig(device="cpu"),
    )
