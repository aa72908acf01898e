"""Everything one training run holds on this rank, and the five things its loop asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from jetrl_conversion.model_spec import load_model_spec
from jetrl_megatron import checkpoint, checkpoint_names, memory, signals
from jetrl_megatron.batch import PackedBatch, Sample, micro_batches, padding_multiple, split_for_ranks
from jetrl_megatron.collective import from_all
from jetrl_megatron.config import Config
from jetrl_megatron.layouts import fp8_tensors
from jetrl_megatron.loss import Divergence, grpo_loss
from jetrl_megatron.megatron import weights, world
from jetrl_megatron.megatron.trainer import Trainer
from jetrl_megatron.metrics import MetricsWriter
from jetrl_megatron.parity import Guard
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.sender import RefitReport, RefitSender
from jetrl_megatron.rollout.agent import replicas
from jetrl_megatron.sampling import Sampler

log = logging.getLogger(__name__)
SPARE = 1 << 30
"""Bytes that must be free on a GPU beside what its sleeping engine will take."""


class Run:
    """Trainer, replicas, task and metrics of one run. A context manager: engines and segments end with it.

    Only rank 0 talks to engines, task and metrics; what it learns is broadcast.
    """

    def __init__(self, config: Config, output: Path):
        self.config, self.output = config, output
        self.model_dir = Path(config.model.path)
        self.device = world.device_for(config)
        self.lead = dist.get_rank() == 0
        self._shares_gpu = config.rollout.colocated and self.device.type == "cuda"
        self._given_back = 0
        """Bytes that the engine on this GPU freed when it went to sleep, and takes when it wakes."""
        self.seconds: dict[str, float] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            config, spec = self.config, load_model_spec(self.model_dir)
            if self.device.type == "cuda":
                memory.check_state(config, spec, torch.cuda.get_device_properties(self.device).total_memory)
            # Rank 0 alone has these three.
            self.pool: Any = None
            self.sampler: Any = None
            self.metrics: Any = None
            places, fp8 = Places.here(config, self.device.type == "cuda"), fp8_tensors(spec, config)
            # First of all: an engine takes longer to start than everything below.
            engines = replicas(self.model_dir, config, fp8, self.output, self.device, places)
            self.pool = stack.enter_context(engines)
            if self.lead:
                self.sampler = Sampler(config, self.model_dir, self.pool)
            self.trainer = Trainer(config, spec, self.device)
            # One rank looks: on a shared file system another may not see the newest folder yet.
            newest = self._from_lead(lambda: checkpoint_names.latest(self.output))
            if newest is None:
                weights.load_hf(self.trainer, self.model_dir)
                self.first_step = 0
            else:
                self.first_step = checkpoint.load(self.trainer, newest)["step"]
            if self.lead:
                self.metrics = stack.enter_context(MetricsWriter(self.output, config.train.steps))
                self.metrics.resume(self.first_step)
            self.sender = RefitSender(self.trainer, self.pool, places)
            stack.callback(self.sender.close)
            self._refitted: RefitReport | None = None
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step; `NAME_seconds` in the metrics."""
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def refit(self) -> RefitReport:
        """Bring the engines to the trainer's weights, unless they are there already. Collective."""
        if self._refitted is None or self._refitted.version != self.trainer.version:
            if self._shares_gpu:
                self._make_room()
            self._refitted = self.sender.send()
        return self._refitted

    def sample(self, step: int) -> list[Sample]:
        """The step's scored samples, on every rank. Collective."""
        return self._from_lead(lambda: self.sampler.sample(step, self.trainer.version))

    def evaluate(self) -> dict[str, float]:
        """pass@1 (and pass@k) on held-out questions at the current weights. Collective."""
        self.refit()
        return self._from_lead(lambda: self.sampler.evaluate())

    def update(self, samples: list[Sample]) -> dict[str, float]:
        """`grpo.updates_per_batch` optimizer steps on the samples. Collective.

        Returns:
            loss, gradient norm, clip fractions, and how far the trainer's log-probs were from the engine's before the
            first update.
        """
        if self._shares_gpu:
            before, _ = torch.cuda.mem_get_info(self.device)
            dist.barrier()  # the lead is ahead: its own samples need no unpickling, and a sleep is short
            self._from_lead(lambda: self.pool.sleep())
            self._given_back = max(self._given_back, torch.cuda.mem_get_info(self.device)[0] - before)
            self.trainer.restore()
        updates = self.config.grpo.updates_per_batch
        divergence = self._divergence(samples) if updates > 1 else None
        for number in range(updates):
            part = samples[number::updates]
            loss, check = self._loss(part), None
            if self.config.precision.parity == "exact" and updates == 1:
                guard = self._guard()
                loss, check = guard.watch(loss), guard.check
            stats, grad_norm = self.trainer.step(self._batches(part), loss, check)
            totals = self._sum(stats)
            divergence = divergence or Divergence(totals["divergence"], totals["peak"])
        tokens = float(totals["loss_tokens"])
        return {
            "loss": float(totals["loss"]),
            "grad_norm": grad_norm,
            "learning_rate": self.trainer.optimizer.param_groups[0]["lr"],
            "entropy_mean": float(totals["entropy"]) / tokens,
            "clip_fraction": float(totals["clipped_low"] + totals["clipped_high"]) / tokens,
            "ratio_mean": float(totals["ratio_sum"]) / tokens,
            **(divergence.metrics() if divergence else {}),
        }

    def log(self, step: int, samples: list[Sample], refit: RefitReport, update: dict, evaluation: dict) -> None:
        """Write the step's line of metrics (rank 0)."""
        if self.metrics is None:
            return
        tokens = sum(len(s.response_ids) for s in samples)
        rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
        total = sum(self.seconds.values())
        self.metrics.log(
            {
                "step": step + 1,
                "policy_version": samples[0].policy_version,
                "reward_mean": float(rewards.mean()),
                "reward_std": float(rewards.std(correction=0)),
                "response_length_mean": tokens / len(samples),
                "truncated_fraction": sum(s.finish_reason == "length" for s in samples) / len(samples),
                **update,
                **refit.metrics(),
                **evaluation,
                **{f"{name}_seconds": value for name, value in self.seconds.items() if name != "refit"},
                "step_seconds": total,
                "rollout_tokens_per_second": tokens / self.seconds["rollout"],
            }
        )

    def due(self, every: int, step: int) -> bool:
        return every > 0 and (step + 1) % every == 0

    def checkpoint_due(self, step: int) -> bool:
        train = self.config.train
        return train.checkpoint_every > 0 and (step + 1 == train.steps or self.due(train.checkpoint_every, step))

    def save(self, step: int) -> None:
        """Checkpoint after `step` steps. Collective."""
        checkpoint.save(self.trainer, self.output, {"step": step}, self.config.train.keep_last)

    def stop_requested(self) -> bool:
        """Whether any rank was asked to save and stop. Collective."""
        flag = torch.tensor([signals.stop_requested() is not None], dtype=torch.int64, device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _make_room(self) -> None:
        """For the engine to wake in: its memory may be in torch's cache, where training left it."""
        if self.config.train.offload:
            self.trainer.offload()
        free, _ = torch.cuda.mem_get_info(self.device)
        if self._given_back and free < self._given_back + SPARE:
            torch.cuda.empty_cache()

    def _from_lead(self, produce) -> Any:
        box = [produce() if self.lead else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _batches(self, samples: list[Sample]) -> list[PackedBatch]:
        parallel = self.config.parallel
        size = self.config.train.micro_batch_size
        batches = micro_batches(
            samples,
            split_for_ranks(samples, parallel.dp, size),
            parallel_state.get_data_parallel_rank(),
            size,
            padding_multiple(parallel.tp, self.device.type == "cuda"),
        )
        return [batch.to(self.device) for batch in batches]

    def _loss(self, samples: list[Sample]):
        grpo = self.config.grpo
        tokens = sum(len(s.response_ids) for s in samples)
        denominator = float(tokens if grpo.loss_norm == "token_mean" else len(samples))

        def loss(batch: PackedBatch, logp, entropy):
            value, stats = grpo_loss(
                logp,
                batch.engine_logp,
                batch.advantages,
                batch.mask,
                clip_low=grpo.clip_low,
                clip_high=grpo.clip_high,
                norm=grpo.loss_norm,
                denominator=denominator,
                importance_cap=grpo.importance_cap,
                sequences=batch.sequence,
            )
            divergence = Divergence.of(logp, batch.engine_logp, batch.mask)
            stats |= {
                "loss": value.detach().double(),
                "entropy": (entropy.detach() * batch.mask).double().sum(),
                "divergence": divergence.sums,
                "peak": divergence.peak,
            }
            return value, stats

        return loss

    def _guard(self) -> Guard:
        def wake() -> None:
            if self._shares_gpu:  # a running engine takes the same weights under a new number only; the run ends here
                self.trainer.version += 1
                self.refit()

        return Guard(self.trainer, self.pool, wake)

    def _divergence(self, samples: list[Sample]) -> Divergence:
        batches = self._batches(samples)
        logps = self.trainer.logprobs(batches)
        if self.config.precision.parity == "exact":
            guard = self._guard()
            for logp, batch in zip(logps, batches):
                guard.note(batch, logp)
            guard.check(batches)
        parts = [Divergence.of(lp, b.engine_logp, b.mask) for lp, b in zip(logps, batches)]
        totals = self._sum([{"divergence": p.sums, "peak": p.peak} for p in parts])
        return Divergence(totals["divergence"], totals["peak"])

    def _sum(self, stats: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Sums over all micro-batches and data-parallel ranks, on every rank: `peak` is combined by maximum."""
        mine = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        parts = from_all([{k: v.cpu() for k, v in s.items()} for s in stats] if mine else [])
        totals: dict[str, torch.Tensor] = {}
        for part in (item for rank in parts for item in rank):
            for name, value in part.items():
                if name not in totals:
                    totals[name] = value.clone()
                else:
                    totals[name] = torch.maximum(totals[name], value) if name == "peak" else totals[name] + value
        return totals
