"""Tasks: where questions come from, how they become token ids, and how answers are rewarded."""

from __future__ import annotations

from pathlib import Path

from jetrl_megatron.config import ConfigError, DataConfig
from jetrl_megatron.data.prompts import Prompt, PromptStream, encode_answer, encode_prompt, supervised_example
from jetrl_megatron.data.task import CORRECT, Item, Task

__all__ = [
    "CORRECT",
    "Item",
    "Prompt",
    "PromptStream",
    "Task",
    "encode_answer",
    "encode_prompt",
    "load_task",
    "supervised_example",
]

GYM = "reasoning_gym:"


def load_task(cfg: DataConfig, seed: int) -> Task:
    """The task that `data.name` names: `reasoning_gym:NAME`, a .jsonl path, or a Hugging Face data set.

    Raises:
        ConfigError: unknown names, options, splits or fields, each with the nearest known one; unreadable data.
    """
    if cfg.name.startswith(GYM):
        from jetrl_megatron.data.gym import GymTask

        return GymTask(cfg.name.removeprefix(GYM), cfg.options, seed)
    from jetrl_megatron.data import records

    if cfg.name.endswith(".jsonl"):
        return records.from_jsonl(cfg, seed)
    if "/" not in cfg.name and not Path(cfg.name).exists() and cfg.name.startswith("reasoning"):
        raise ConfigError([f"data.name: {cfg.name!r}: reasoning-gym data sets are written {GYM}NAME"])
    return records.from_datasets(cfg, seed)
