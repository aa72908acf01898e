"""Find the operation at which trainer and engine part: both run one sequence again and digest every result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from jetrl_megatron.activations import first_difference, merge
from jetrl_megatron.batch import PackedBatch
from jetrl_megatron.collective import from_all
from jetrl_megatron.megatron import forward
from jetrl_megatron.megatron.probe import watched
from jetrl_megatron.megatron.trainer import Trainer
from jetrl_megatron.parity import Difference
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.pool import EnginePool

Sides = tuple[dict[str, int], list[float]]
"""(digest by operation, log-prob of every token but the first at temperature 1)"""


def earliest(mine: Difference | None) -> Difference | None:
    """The difference of the lowest data-parallel rank, on every rank. Collective."""
    return min((d for d in from_all(mine) if d is not None), key=lambda d: d.dp_rank, default=None)


def engine_side(engine: RolloutEngine, tokens: list[int]) -> Sides:
    """One prefill of `tokens` in a running engine, uncompiled."""
    engine.call_workers("jetrl_record", len(tokens))
    scores = engine.score([tokens])[0]
    return merge(engine.call_workers("jetrl_recorded")), scores


def trainer_side(trainer: Trainer, batch: PackedBatch | None, start: int, length: int) -> Sides:
    """The same of rows start ... start + length of a micro-batch, None on ranks that do not have it. Collective."""
    digests: dict[str, int] = {}
    logp: list[float] = []
    if batch is not None:
        # The prompt's tokens too: the engine scores them all.
        batch = replace(batch, predicting=torch.arange(start, start + length - 1, device=batch.tokens.device))
        with watched(trainer, start, length) as seen:
            last = forward.logprobs(
                trainer.model, [batch], temperature=1.0, vocab_size=trainer.spec.vocab_size, exact=True
            )
        digests = seen.found()
        logp = last[0][start : start + length - 1].tolist() if last else []
    parts = from_all((digests, logp))
    return merge(part for part, _ in parts), next((scores for _, scores in parts if scores), [])


def compare(ours: Sides, theirs: Sides, layers: int) -> str | None:
    """The first operation that differs, the log-softmax included; None if there is none."""
    found = first_difference(ours[0], theirs[0], layers)
    return found or ("log-softmax" if ours[1] != theirs[1] else None)


def locate(
    trainer: Trainer, pool: EnginePool | None, wake: Callable[[], Any], batches: Sequence[PackedBatch], at: Difference
) -> str:
    """What to tell the user about where the difference begins. Collective; rank 0 has the pool."""
    wake()
    here = parallel_state.get_data_parallel_rank() == at.dp_rank
    ours = trainer_side(trainer, batches[at.micro_batch] if here else None, at.start, len(at.tokens))
    said: list[str] = [""]
    if pool is not None:
        near = [engine for engine in pool.engines if isinstance(engine, RolloutEngine)]
        said[0] = _verdict(ours, [engine_side(engine, at.tokens) for engine in near], trainer, at)
        if len(near) < len(pool.engines):
            said[0] += " (engines of other nodes were not asked)"
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _verdict(ours: Sides, engines: list[Sides], trainer: Trainer, at: Difference) -> str:
    for number, theirs in enumerate(engines):
        if found := compare(ours, theirs, trainer.spec.num_layers):
            which = f" (engine {number})" if len(engines) > 1 else ""
            return f"run again, the first operation that differs is {found}{which}"
    again = ours[1][at.index - 1]
    if trainer.config.rollout.temperature != 1.0:
        return "run again at temperature 1, prefill and trainer agree: look at temperature, decoding and compiled code"
    if again == at.trainer:
        return "run again by prefill, uncompiled, the engine agrees: its decoding, batch or compiled code differs"
    if again == at.engine:
        return "run again without gradients, the trainer agrees: its layers that are fused for training differ"
    return "run again, both sides agree on a third number: the operations do not repeat"
