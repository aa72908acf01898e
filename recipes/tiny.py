"""Recipes that run on a machine without a GPU: the same program, a model of a few million parameters made locally."""

from __future__ import annotations

from jetrl_megatron.config import Config, ParallelConfig
from jetrl_recipes.registry import recipe


@recipe()
def tiny_cpu() -> Config:
    return Config(
        purpose="learn chains of sums on a laptop in minutes: two trainer ranks and one engine, no GPU",
        parallel=ParallelConfig(tp=2),
    )
