"""The trainer's half of a refit: every rank writes its slices of the new weights where the engines read them.

One plan (`jetrl_conversion.planner`) says which rectangle goes where. Ranks that share a host with the engines write
into their segments directly; ranks elsewhere send their rectangles to rank 0, one parameter after another, and nobody
ever holds a tensor that is not its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_conversion.planner import plan_reshard
from jetrl_kernels.quant_weight import QuantizedWeight, quant_weight
from jetrl_megatron.layouts import fp8_tensors, rollout_layout, trainer_layout
from jetrl_megatron.megatron.model import fp8_layers
from jetrl_megatron.megatron.trainer import Trainer
from jetrl_megatron.refit import ipc
from jetrl_megatron.refit.digests import merge_digests, rank_digests
from jetrl_megatron.refit.ipc import Exporter
from jetrl_megatron.refit.message import SCALE_SUFFIX, RefitMessage, TensorSlot, plan_slots, segment_bytes
from jetrl_megatron.refit.rectangles import Part, cut, pairs, parts
from jetrl_megatron.refit.shm import Segment
from jetrl_megatron.rollout.pool import EnginePool


@dataclass(frozen=True, kw_only=True)
class RefitReport:
    version: int
    tensors: int
    """Tensors compared by digest, codes and scales counted apart."""
    mismatched: int
    nbytes: int
    """Bytes that reached the engines' segments, once for each engine rank."""
    seconds: float

    def metrics(self) -> dict[str, float]:
        return {
            "refit_tensors": self.tensors,
            "refit_tensors_mismatched": self.mismatched,
            "refit_bytes": self.nbytes,
            "refit_seconds": self.seconds,
        }


class RefitSender:
    """Sends the trainer's current weights to all replicas. Collective: every trainer rank calls `send`.

    Args:
        pool: the replicas, on rank 0; None elsewhere.
    """

    def __init__(self, trainer: Trainer, pool: EnginePool | None):
        config, spec = trainer.config, trainer.spec
        self.trainer, self.pool = trainer, pool
        self.layout, self.target = trainer_layout(config), rollout_layout(config)
        self.fp8 = fp8_tensors(spec, config) if config.precision.mode != "bf16" else set()
        self.plan = plan_reshard(spec, self.layout, self.target, fp8=bool(self.fp8))
        self.slots = [plan_slots(spec, self.target, rank, self.fp8) for rank in range(self.target.world)]
        self._own: dict[str, QuantizedWeight] = {}
        self.exporter: Exporter | None = None
        self.segments, self.near = [], []
        if trainer.device.type == "cuda":
            self.exporter = Exporter(self._copies(), f"rank{dist.get_rank()}")
        else:
            self.segments, self.near = self._open_segments()

    def send(self) -> RefitReport:
        """Write, load, compare.

        Raises:
            RefitMismatch, EngineDied, EngineError: on rank 0, which ends the run on all.
        """
        started = time.perf_counter()
        parameters = self._parameters()
        if self.exporter is not None:
            segments = self._tables(self.exporter.table(parameters))
        else:
            self._write(parameters)
            segments = [str(s.path) for s in self.segments]
        message = self._message(segments)
        if self.exporter is None:
            ours = self._gather_digests(parameters)
            dist.barrier()
            mismatched = 0 if self.pool is None else self.pool.load(message, ours)
        else:
            # The bytes are there already: engines copy and digest while the trainer digests.
            torch.cuda.synchronize()
            dist.barrier()
            ours, mismatched = self._load_meanwhile(message, parameters)
        dist.barrier()
        return RefitReport(
            version=self.trainer.version,
            tensors=len(ours),
            mismatched=mismatched,
            nbytes=self.plan.total_bytes,
            seconds=time.perf_counter() - started,
        )

    def _message(self, segments: list[str]) -> RefitMessage:
        return RefitMessage(
            version=self.trainer.version,
            scales=self.trainer.config.precision.scales if self.fp8 else "none",
            segments=tuple(segments),
            slots=tuple(self.slots),
        )

    def _load_meanwhile(self, message: RefitMessage, parameters: Mapping[str, Tensor]) -> tuple[dict[str, int], int]:
        """The trainer's digests, and how many tensors differed (0 on ranks without engines)."""
        if self.pool is None:
            return self._gather_digests(parameters), 0
        digests: Future[Mapping[str, int]] = Future()
        with ThreadPoolExecutor(1) as beside:
            loading = beside.submit(self.pool.load, message, digests)
            try:
                ours = self._gather_digests(parameters)
                digests.set_result(ours)
            except BaseException as error:
                digests.set_exception(error)
                raise
            return ours, loading.result()

    def close(self) -> None:
        if self.exporter is not None:
            self.exporter.close()
        if dist.get_rank() == 0:
            for segment in self.segments:
                segment.unlink()

    def _open_segments(self) -> tuple[list[Segment], list[bool]]:
        """Segments that this rank can write, and for each rank whether it can: only those on the engines' host."""
        segments: list[Segment] = []
        paths: list[list[str]] = [[]]
        if dist.get_rank() == 0:
            segments = [Segment.create(segment_bytes(slots), f"engine{r}") for r, slots in enumerate(self.slots)]
            paths = [[str(s.path) for s in segments]]
        dist.broadcast_object_list(paths, src=0)
        if dist.get_rank() != 0 and all(Path(p).exists() for p in paths[0]):
            segments = [Segment.attach(p) for p in paths[0]]
        near: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(near, bool(segments))
        return segments, near

    def _parameters(self) -> dict[str, Tensor]:
        """Live tensors by Megatron name; FP8 parameters as codes, with their scales under `name + "_scale_inv"`.

        Under `jetrl` these are the bytes that the next forward's GEMMs consume. Under `mixed` the trainer has none,
        and quantizes its BF16 weights for the engine alone.
        """
        found: dict[str, Tensor] = {n: p.detach() for n, p in self.trainer.parameters().items()}
        quantized: dict[str, QuantizedWeight] = {}
        for name, layer in fp8_layers(self.trainer.model).items():
            assert layer.qweight is not None
            quantized[f"{name}.weight"] = layer.qweight
        for name in self._fp8_names() - quantized.keys():
            quantized[name] = self._bytes_of(name, found[name])
        for name, qweight in quantized.items():
            found[name], found[name + SCALE_SUFFIX] = qweight.codes, qweight.scale
        return found

    def _bytes_of(self, name: str, weight: Tensor) -> QuantizedWeight:
        """FP8 bytes that only the engine uses, always at the same place: an engine maps them once."""
        fresh = quant_weight(weight, self.trainer.config.precision.scales)
        own = self._own.setdefault(name, fresh)
        if own is not fresh:
            own.codes.copy_(fresh.codes)
            own.scale.copy_(fresh.scale)
        return own

    def _copies(self) -> list[list[Part]]:
        """For each engine rank, the rectangles that it takes from this trainer rank."""
        copies: list[list[Part]] = [[] for _ in range(self.target.world)]
        for transfer in self.plan.sends(dist.get_rank()):
            copies[transfer.dst_rank] += parts(transfer)
        return copies

    def _tables(self, table: Path) -> list[str]:
        """For each engine rank, the tables of the trainer ranks that feed it."""
        tables: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(tables, str(table))
        feeds = [{t.src_rank for t in self.plan.receives(rank)} for rank in range(self.target.world)]
        return [ipc.PREFIX + ",".join(tables[rank] for rank in sorted(ranks)) for ranks in feeds]

    def _fp8_names(self) -> set[str]:
        return {t.src_local for t in self.plan.sends(dist.get_rank()) if t.quantized} if self.fp8 else set()

    def _write(self, parameters: Mapping[str, Tensor]) -> None:
        slots = [{s.name: s for s in rank_slots} for rank_slots in self.slots]
        rank = dist.get_rank()
        if self.near[rank]:
            for transfer in self.plan.sends(rank):
                for source, target in pairs(transfer, parameters, lambda at, name: self._view(at, slots, name)):
                    target.copy_(source)
        for far in (r for r, near in enumerate(self.near) if not near):
            if rank == far:
                for transfer in self.plan.sends(rank):
                    for name, at, size, _, _ in parts(transfer):
                        dist.send(_as_bytes(cut(parameters[name], at, size).contiguous()), dst=0)
            elif rank == 0:
                for transfer in self.plan.sends(far):
                    for _, _, size, name, at in parts(transfer):
                        target = cut(self._view(transfer.dst_rank, slots, name), at, size)
                        buffer = torch.empty(size if target.dim() == 2 else size[:1], dtype=target.dtype)
                        dist.recv(_as_bytes(buffer), src=far)
                        target.copy_(buffer)

    def _view(self, dst_rank: int, slots: list[dict[str, TensorSlot]], name: str) -> Tensor:
        return self.segments[dst_rank].view(slots[dst_rank][name])

    def _gather_digests(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        part = rank_digests(self.trainer.spec, self.layout, dist.get_rank(), parameters)
        parts: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(parts, part)
        return merge_digests(parts)


def _as_bytes(tensor: Tensor) -> Tensor:
    """gloo knows no FP8: send bytes."""
    return tensor.reshape(-1).view(torch.uint8)
