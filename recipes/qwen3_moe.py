"""Qwen3-30B-A3B, a mixture of experts: layouts and conversion only, until the trainer runs experts.

`jetrl train` refuses it with that reason. It is here so that `jetrl estimate` and the planner cover the family.
"""

from __future__ import annotations

from jetrl_megatron.config import Config, ParallelConfig
from jetrl_recipes.cluster import math, on_h100
from jetrl_recipes.registry import recipe


@recipe(modes=("bf16",))
def qwen3_30b_a3b_8k() -> Config:
    config = on_h100(
        "Qwen3-30B-A3B",
        answer=8192,
        data=math(),
        parallel=ParallelConfig(tp=8, pp=2, dp=2, nodes=4, sequence_parallel=True),
        rollout_tp=4,
        utilization=0.6,
    )
    config.purpose = "conversion and estimates only: experts are not trained yet, in no precision"
    return config
