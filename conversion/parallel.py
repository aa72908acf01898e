"""A parallel layout: how many ranks, and what each rank's place is. `layout.py` says what lies on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jetrl_conversion.errors import LayoutError
from jetrl_conversion.model_spec import ModelSpec, Rule

VLLM_VOCAB_MULTIPLE = 64  # vllm.model_executor.layers.vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True)
class Layout:
    """A way to spread a model over `world` ranks.

    Args:
        kind: "hf" (one rank, whole tensors), "megatron" or "vllm".
        tp, pp, ep: tensor, pipeline, expert parallel sizes. vLLM: pp is 1, ep is 1 or a multiple of tp (experts whole).
        etp: Megatron's expert tensor parallel size; None means tp.
        dp: how many copies of the whole model the world holds (data or context parallel; rollout replicas).
        norm: Megatron's layer spec, "local" (norms are modules) or "te" (norms inside the linears that follow).
        experts: Megatron's expert module, "sequential" (SequentialMLP) or "grouped" (TEGroupedMLP).
        vocab_multiple: Megatron pads the vocabulary to a multiple of this times tp.
    """

    kind: Literal["hf", "megatron", "vllm"]
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    norm: Literal["local", "te"] = "local"
    experts: Literal["sequential", "grouped"] = "sequential"
    vocab_multiple: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"layout {self.kind}: {key} must be a positive integer, it is {value!r}"
            for key, value in [("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("etp", self.etp or 1),
                               ("dp", self.dp), ("vocab_multiple", self.vocab_multiple)]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]  # fmt: skip
        if self.kind not in ("hf", "megatron", "vllm"):
            problems.append(f"layout kind {self.kind!r} is not one of hf, megatron, vllm")
        if problems:
            raise LayoutError(problems)
        if self.kind == "hf" and (self.tp, self.pp, self.ep) != (1, 1, 1):
            problems.append(f"layout {self}: a Hugging Face folder holds whole tensors, tp = pp = ep = 1")
        if self.kind == "vllm" and self.pp != 1:
            problems.append(f"layout {self}: rollout pipeline parallel is not supported, pp must be 1")
        if self.kind == "vllm" and self.ep != 1 and self.ep % self.tp:
            problems.append(f"layout {self}: vLLM's expert parallel size is 1 or a multiple of tp = {self.tp}")
        if problems:
            raise LayoutError(problems)

    def __str__(self) -> str:
        sizes = [f"{key}={value}" for key, value in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)) if value > 1]
        sizes += [f"etp={self.etp}"] if self.etp not in (None, self.tp) else []
        sizes += [f"dp={self.dp}"] if self.dp > 1 else []
        return f"{self.kind}({', '.join(sizes)})"

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        if self.kind == "vllm":
            return self.tp if self.ep == 1 else 1
        return self.etp or self.tp

    @property
    def inner(self) -> int:
        """Ranks of one pipeline stage."""
        return math.lcm(self.tp, self.expert_tp * self.ep) * self.dp

    @property
    def world(self) -> int:
        return self.inner * self.pp

    def coords(self, rank: int) -> Coords:
        """Raises LayoutError if `rank` is not in range(world)."""
        if not 0 <= rank < self.world:
            raise LayoutError(f"layout {self}: rank {rank} is not in 0..{self.world - 1}")
        pp, inner = divmod(rank, self.inner)
        etp = self.expert_tp
        return Coords(inner % self.tp, pp, inner // etp % self.ep, inner % etp)


class Coords(NamedTuple):
    tp: int
    pp: int
    ep: int
    etp: int


def padded_vocab(spec: ModelSpec, layout: Layout) -> int:
    """Vocabulary rows of embedding and head over all tensor-parallel ranks, padding included."""
    if layout.kind == "hf":
        return spec.vocab_size
    multiple = VLLM_VOCAB_MULTIPLE if layout.kind == "vllm" else layout.vocab_multiple * layout.tp
    return -(-spec.vocab_size // multiple) * multiple


def shard_count(rule: Rule, layout: Layout) -> int:
    """How many different shards of this tensor exist: tp, expert tp, or 1 for replicated tensors."""
    if rule.row.split == "copy":
        return 1
    return layout.expert_tp if rule.experts > 1 else layout.tp
