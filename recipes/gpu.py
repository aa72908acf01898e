"""Recipes for one Hopper GPU: engine and trainer share it."""

from __future__ import annotations

from jetrl_megatron.config import Config, GRPOConfig, OptimizerConfig, RolloutConfig, TrainConfig
from jetrl_recipes.registry import as_it_is, recipe


@recipe(exact=as_it_is)
def tiny_gpu() -> Config:
    return Config(
        purpose="the tiny model on one Hopper GPU: the whole program in minutes, engine compiled and captured",
        rollout=RolloutConfig(
            max_num_seqs=256, max_num_batched_tokens=8192, gpu_memory_utilization=0.2, start_timeout_s=600.0
        ),
        grpo=GRPOConfig(prompts_per_step=32, group_size=8),
        optimizer=OptimizerConfig(lr=1e-5),
        train=TrainConfig(micro_batch_size=128, device="cuda", timeout_s=600.0),
    )
