"""`precision.parity=exact`: which runs it can be promised for, the check of every step, and where a difference begins.

The promise: the trainer's forward log-prob of every sampled token is the engine's own, to the bit. It is kept by
construction (docs/exact.md names for each operation why both sides agree) and checked before each update, so that
nothing is ever trained on a token that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetrl_conversion.model_spec import ModelSpec
from jetrl_megatron.config import Config
from jetrl_megatron.errors import RunError
from jetrl_megatron.layouts import fp8_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_megatron.batch import PackedBatch
    from jetrl_megatron.megatron.trainer import Trainer
    from jetrl_megatron.rollout.pool import EnginePool


class ParityError(RunError):
    """A token's log-prob differs between trainer and engine. Says which, and the first operation that differs."""


def problems(config: Config, spec: ModelSpec, cpu: bool) -> list[str]:
    """Why `precision.parity=exact` cannot be promised for this run, one line each; nothing where it is off."""
    precision, trainer_tp, engine_tp = config.precision, config.parallel.tp, config.rollout.tp
    if precision.parity == "off":
        return []
    found = []
    if precision.mode != "jetrl":
        found.append(f"needs precision.mode=jetrl, the same FP8 on both sides, not {precision.mode}")
    if precision.linear_backend != "jetrl":
        found.append(
            f"needs precision.linear_backend=jetrl, not {precision.linear_backend}: another GEMM library gives other "
            "bits where few rows meet a deep K"
        )
    if spec.num_experts:
        found.append(
            f"{spec.family} is a mixture of experts: neither its router nor its expert GEMMs are shared with the engine"
        )
    plain = sorted(name for name, t in spec.tensors().items() if t.quantized) if precision.mode == "jetrl" else []
    plain = [name for name in plain if name not in fp8_tensors(spec, config)]
    if plain:
        found.append(
            f"{len(plain)} linear layers stay BF16 in this layout ({plain[0]}, ...), and a BF16 GEMM's result depends "
            "on the batch: choose a layout that keeps 128x128 tiles whole"
        )
    if cpu:
        if engine_tp > 1:
            found.append(f"needs rollout.tp=1 on a CPU, not {engine_tp}: only there K-blocks are added in one order")
    else:
        if trainer_tp != engine_tp or trainer_tp > 2:
            found.append(
                f"needs parallel.tp = rollout.tp, at most 2, on GPUs, not {trainer_tp} and {engine_tp}: of more than "
                "two parts NCCL picks the order of addition by message size (parallel.pp and dp are free)"
            )
        elif spec.vocab_size % (128 * trainer_tp):
            found.append(
                f"the vocabulary of {spec.vocab_size} is no multiple of {128 * trainer_tp}: both sides would pad it "
                "differently"
            )
        if spec.head_dim != 128:
            found.append(
                f"needs heads of 128, not {spec.head_dim}: at 32, 64, 80 and 96 FlashAttention 3 decodes with "
                "tiles of another size than it reads prompts with, other sizes are not tried"
            )
    return [f"precision.parity=exact: {line}" for line in found]


@dataclass(frozen=True)
class Difference:
    """The first token that differs, on the rank that found it."""

    dp_rank: int
    micro_batch: int
    start: int
    """Row of the micro-batch at which its sequence begins."""
    tokens: list[int]
    """The whole sequence."""
    index: int
    """Which of them is predicted differently."""
    trainer: float
    engine: float
    differing: int
    """Tokens of this rank's batch that differ, of `sampled`."""
    sampled: int

    def __str__(self) -> str:
        return (
            f"{self.differing} of {self.sampled} log-probs differ, first that of token {self.index} "
            f"(id {self.tokens[self.index]}) of a sequence of {len(self.tokens)}: trainer {self.trainer!r}, engine "
            f"{self.engine!r}, apart by {abs(self.trainer - self.engine):.3g}"
        )


def first_differing(dp_rank: int, batches: Sequence[PackedBatch], logps: Sequence[Tensor]) -> Difference | None:
    """Compare every sampled token of this rank's micro-batches bit for bit (as FP32 numbers; NaN differs)."""
    wrong = [(logp != batch.engine_logp) & batch.mask for batch, logp in zip(batches, logps)]
    counts = [int(w.sum()) for w in wrong]
    for number, (batch, logp, count) in enumerate(zip(batches, logps, counts)):
        if not count:
            continue
        row = int(wrong[number].nonzero()[0])
        sequence = int(batch.sequence[row])
        start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
        return Difference(
            dp_rank=dp_rank,
            micro_batch=number,
            start=start,
            tokens=batch.tokens[start:end].tolist(),
            index=row + 1 - start,
            trainer=float(logp[row]),
            engine=float(batch.engine_logp[row]),
            differing=sum(counts),
            sampled=sum(int(b.mask.sum()) for b in batches),
        )
    return None


class Guard:
    """Holds one update to the promise: notes the trainer's log-probs as the loss sees them, and stops the run.

    Args:
        wake: brings sleeping engines back to the trainer's weights; called only to find where a difference begins.
    """

    def __init__(self, trainer: Trainer, pool: EnginePool | None, wake: Callable[[], Any]):
        self.trainer, self.pool, self.wake = trainer, pool, wake
        self._batches: list[PackedBatch] = []
        self._logps: list[Tensor] = []

    def watch(self, loss: Any) -> Any:
        """The same loss function, with its log-probs noted."""

        def watched(batch: PackedBatch, logp: Tensor, entropy: Tensor):
            self.note(batch, logp)
            return loss(batch, logp, entropy)

        return watched

    def note(self, batch: PackedBatch, logp: Tensor) -> None:
        self._batches.append(batch)
        self._logps.append(logp.detach())

    def check(self, batches: Sequence[PackedBatch]) -> None:
        """Collective: every rank, after the forward pass over its `batches` and before anything uses its gradients.

        Raises:
            ParityError: on every rank, if a token differed on any.
        """
        from megatron.core import parallel_state

        from jetrl_megatron import parity_search

        dp_rank = parallel_state.get_data_parallel_rank()
        mine = first_differing(dp_rank, self._batches, self._logps)
        found = parity_search.earliest(mine)
        if found is not None:
            where = parity_search.locate(self.trainer, self.pool, self.wake, batches, found)
            raise ParityError(f"parity=exact: {found}; {where}. Nothing was trained on these tokens")
