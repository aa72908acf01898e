"""What crosses the pipe between a trainer rank and its engine process. Imports neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jetrl_megatron.errors import RunError


class EngineError(RunError):
    """The engine could not do what it was asked to."""


class EngineDied(EngineError):
    """The engine process is gone (or was killed because it did not answer in time). Says how, with its last lines."""


class GenerationRefused(EngineError, ValueError):
    """A request that would not give what a training step needs; nothing was sampled."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("generation refused: " + "; ".join(self.problems))

    def __reduce__(self):
        return GenerationRefused, (self.problems,)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Everything an engine process is built from."""

    model_dir: str
    modules: tuple[str, ...]
    """FP8 modules by vLLM name; empty in mode bf16."""
    scales: str
    """Scale policy of the FP8 modules, `none` if there are none."""
    tp: int
    max_length: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes: int
    gpu_memory_utilization: float
    enforce_eager: bool
    cpu: bool
    sleep: bool = False
    """Give the GPU's memory back between sampling and the next refit."""
    attention_splits: bool = False
    """Let vLLM split long contexts over thread blocks as the batch suggests: decode is then no longer prefill's equal.
    Only `jetrl bench parity` asks for it, to tell what one split costs."""
    worker_extension: str = "jetrl_megatron.rollout.probe.ProbeExtension"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one call samples. Nothing else takes part: no penalties, no minimum, no folder's generation_config.json."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Ids that end an answer; the id that ended it is its last token."""
    top_p: float = 1.0
    top_k: int = -1
    for_training: bool = True
    """Refuse what cuts the distribution: its log-probs would not be those of the policy that is trained."""

    def problems(self) -> list[str]:
        found = []
        if self.temperature < 0 or (self.for_training and self.temperature == 0):
            found.append(f"temperature={self.temperature}: training samples at a temperature above 0")
        if self.max_tokens < 1:
            found.append(f"max_tokens={self.max_tokens}: at least 1")
        if self.for_training and self.top_p != 1.0:
            found.append(f"top_p={self.top_p}: training needs the whole distribution (1.0)")
        if self.for_training and self.top_k not in (-1, 0):
            found.append(f"top_k={self.top_k}: training needs the whole distribution (-1)")
        return found


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer."""

    prompt_ids: list[int]
    token_ids: list[int]
    """Sampled ids, the stop token included if there was one; nothing is appended."""
    logprobs: list[float]
    """Natural log-prob of each sampled id under the distribution that it was drawn from (after temperature)."""
    finish_reason: str
    """`stop`: ended by a stop token. `length`: cut off."""
    version: int
    """Weights that sampled it."""
    cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a ready engine says about itself; the trainer compares it with its own."""

    vllm: str
    attention_isa: str | None
    """Instruction set of the attention kernel (CPU)."""
    attention_block: int
    rope_digest: int | None
    """`jetrl_kernels.digest` of the rotary table."""
    sampling_defaults: dict[str, Any]
    numerics: dict[str, str]
    """Environment variables that change numerics, with the values in effect."""
