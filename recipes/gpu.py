"""Recipes for one or two Hopper GPUs with the tiny model: the whole program in minutes."""

from __future__ import annotations

from jetrl_megatron.config import (
    Config,
    DataConfig,
    GRPOConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)
from jetrl_recipes.registry import as_it_is, recipe

SIDE = 23
"""Of a Game of Life board: its cells and their commas are an answer of 1106 tokens."""


def _long_answers() -> Config:
    return Config(
        model=ModelConfig(max_length=2432),
        rollout=RolloutConfig(
            max_response_tokens=1152,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            # Several runs may share the GPU: each takes what it needs and no share of the rest.
            gpu_memory_utilization=0.0,
            memory_gib=1.0,
            start_timeout_s=600.0,
        ),
        grpo=GRPOConfig(prompts_per_step=8, group_size=8),
        # A wrong bracket costs the whole reward: at 2e-4 without warm-up runs lost the form of an answer for good.
        optimizer=OptimizerConfig(lr=5e-5, warmup_steps=5),
        data=DataConfig(
            name="reasoning_gym:game_of_life",
            options={"grid_size_x": SIDE, "grid_size_y": SIDE, "filled_cells": 366},
            eval_size=32,
        ),
        # The policy should know the form of an answer (one wrong bracket in a thousand tokens spoils it), and little
        # more. A board takes 40 ms to make.
        sft=SFTConfig(steps=400, batch_size=8, lr=1e-3, examples=400),
        train=TrainConfig(steps=60, micro_batch_size=16, device="cuda", timeout_s=600.0),
    )


@recipe(exact=as_it_is)
def tiny_gpu() -> Config:
    config = _long_answers()
    config.purpose = "Game of Life, answers of 1,100 tokens, the tiny model: three modes side by side on one GPU"
    return config


@recipe()
def tiny_2gpu() -> Config:
    config = _long_answers()
    config.purpose = "the same with the trainer on one GPU and the engine on another"
    config.rollout.colocated = False
    return config
