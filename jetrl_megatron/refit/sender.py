"""The trainer's half of a refit: every rank moves its slices of the new weights to where the engines read them.

One plan (`jetrl_conversion.planner`) says which rectangle goes where, and nobody ever holds a tensor that is not its
own. How the bytes travel is chosen for each pair of ranks (`transports.py`); what engines are told, and how both sides
compare, is the same for all.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_conversion.layout import pieces
from jetrl_kernels.quant_weight import QuantizedWeight, quant_weight
from jetrl_megatron.collective import from_all
from jetrl_megatron.layouts import fp8_tensors, rollout_layout, trainer_layout
from jetrl_megatron.megatron.model import fp8_layers
from jetrl_megatron.megatron.trainer import Trainer
from jetrl_megatron.refit import ipc
from jetrl_megatron.refit.digests import Digester, merge_digests
from jetrl_megatron.refit.ipc import Exporter
from jetrl_megatron.refit.member import Member
from jetrl_megatron.refit.message import PLACED, SCALE_SUFFIX, RefitMessage
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.rectangles import Part, parts
from jetrl_megatron.refit.route import Route
from jetrl_megatron.rollout.pool import EnginePool


@dataclass(frozen=True, kw_only=True)
class RefitReport:
    version: int
    tensors: int
    """Tensors compared by digest, codes and scales counted apart."""
    mismatched: int
    nbytes: int
    """Bytes of the plan: what each rank of a replica holds, once for each node with replicas."""
    wire: int
    """Bytes that travelled between members in packs; the others were written or read in place."""
    seconds: float
    digest_seconds: float
    """Of `seconds`: this rank's own digests. Engines load the last chunk, and take theirs, meanwhile."""

    def metrics(self) -> dict[str, float]:
        return {
            "refit_tensors": self.tensors,
            "refit_tensors_mismatched": self.mismatched,
            "refit_bytes": self.nbytes,
            "refit_wire_bytes": self.wire,
            "refit_seconds": self.seconds,
            "refit_digest_seconds": self.digest_seconds,
        }


class RefitSender:
    """Sends the trainer's current weights to all replicas. Collective: every trainer rank calls `send`.

    Args:
        pool: the replicas, on rank 0; None elsewhere.
        places: which node each rank and replica is on; by torchrun's variables if None.
    """

    def __init__(self, trainer: Trainer, pool: EnginePool | None, places: Places | None = None):
        config, spec = trainer.config, trainer.spec
        self.trainer, self.pool, self.rank = trainer, pool, dist.get_rank()
        self.layout, self.places = trainer_layout(config), places or Places.here(config, trainer.device.type == "cuda")
        self.fp8 = fp8_tensors(spec, config) if config.precision.mode != "bf16" else set()
        self.member = Member(
            spec, self.layout, rollout_layout(config), self.fp8, self.places, self.rank, trainer.device, config.refit
        )
        self.plan = self.member.plan
        self._own: dict[str, QuantizedWeight] = {}
        self._digester, self._digest_seconds = Digester(spec, self.layout, self.rank), 0.0
        self._feeds = {dst: sorted({t.src_rank for t in self.plan.receives(dst)}) for dst in self.member.pulled}
        self.route = Route(self.member, pool)
        pulled = any(self.places.near(self.rank, dst) for dst in self.member.pulled)
        self.exporter = Exporter(self._copies(), f"rank{self.rank}") if pulled else None

    def send(self) -> RefitReport:
        """Write, load, compare.

        Raises:
            RefitMismatch, EngineDied, EngineError: on rank 0, which ends the run on all. TransferFailed: on all.
        """
        started = time.perf_counter()
        if self.pool is not None:
            self.pool.withdraw()
        parameters, version = self._parameters(), self.trainer.version
        tables = self._tables(parameters)
        wire, chunks = 0, self.member.chunks
        with ThreadPoolExecutor(1) as beside:
            loading: Future[int] | None = None
            for chunk in range(chunks):
                wire += self.route.move(parameters, version, chunk, self._expose).wire
                # Engines copy one chunk while the next arrives at the other end of their buffers.
                if loading is not None:
                    loading.result()
                if self.pool is not None and chunk + 1 < chunks:
                    loading = beside.submit(self.pool.load, self._messages(chunk, {}))
                dist.barrier()
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize()
            dist.barrier()
        # The bytes are there already: engines copy and digest while the trainer digests.
        ours, mismatched = self._load_meanwhile(self._messages(chunks - 1, tables), parameters)
        dist.barrier()
        return RefitReport(
            version=version,
            tensors=len(ours),
            mismatched=mismatched,
            nbytes=self.plan.total_bytes,
            wire=wire,
            seconds=time.perf_counter() - started,
            digest_seconds=self._digest_seconds,
        )

    def _messages(self, chunk: int, tables: Mapping[int, str]) -> dict[int, RefitMessage]:
        """For each replica that takes part in this chunk, where its bytes are."""
        found = {}
        for replica, node in enumerate(self.places.replicas):
            ranks = self.places.ranks_on(node)
            pulled, placed = ranks[0] in self.member.pulled, ranks[0] in self.member.placed
            if node not in self.route.reached or (pulled and not tables):
                continue
            if placed:
                found[replica] = self._placed_message
                continue
            found[replica] = RefitMessage(
                version=self.trainer.version,
                scales=self._scales,
                segments=tuple(tables[dst] if pulled else self.route.segments[dst] for dst in ranks),
                slots=self.member.whole if pulled else self.member.slots,
                chunk=0 if pulled else chunk,
                chunks=1 if pulled else self.member.chunks,
            )
        return found

    @property
    def _scales(self) -> str:
        return self.trainer.config.precision.scales if self.fp8 else "none"

    @property
    def _placed_message(self) -> RefitMessage:
        return RefitMessage(self.trainer.version, self._scales, (PLACED,) * self.places.tp, self.member.whole)

    def _expose(self) -> dict[int, list[str]]:
        """See `Route.move`: tables of the engines that bytes are placed in. Empty on other ranks than 0."""
        found: dict[int, list[str]] = {}
        if self.pool is not None and self.member.placed:
            placed = {node for dst, node in enumerate(self.places.destinations) if dst in self.member.placed}
            asked = {r: self._placed_message for r, node in enumerate(self.places.replicas) if node in placed}
            for replica, tables in sorted(self.pool.expose(asked).items()):
                for dst, table in zip(self.places.ranks_on(self.places.replicas[replica]), tables):
                    found.setdefault(dst, []).append(table)
        return found

    def _load_meanwhile(
        self, messages: Mapping[int, RefitMessage], parameters: Mapping[str, Tensor]
    ) -> tuple[dict[str, int], int]:
        """The trainer's digests, and how many tensors differed (0 on ranks without engines)."""
        if self.pool is None:
            return self._gather_digests(parameters), 0
        digests: Future[Mapping[str, int]] = Future()
        with ThreadPoolExecutor(1) as beside:
            loading = beside.submit(self.pool.load, messages, digests)
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
        self.route.close()

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
        for name in self._fp8_names - quantized.keys():
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
        """For each rank of a replica on this node, the rectangles that it takes from this trainer rank."""
        copies: list[list[Part]] = [[] for _ in range(self.places.tp)]
        for transfer in self.plan.sends(self.rank):
            if transfer.dst_rank in self.member.pulled and self.places.near(self.rank, transfer.dst_rank):
                copies[transfer.dst_rank % self.places.tp] += parts(transfer)
        return copies

    def _tables(self, parameters: Mapping[str, Tensor]) -> dict[int, str]:
        """For each destination rank that reads trainers' buffers, the tables of those."""
        if not self.member.pulled:
            return {}
        table = "" if self.exporter is None else str(self.exporter.table(parameters))
        tables = from_all(table)
        return {dst: ipc.PREFIX + ",".join(tables[rank] for rank in ranks) for dst, ranks in self._feeds.items()}

    @functools.cached_property
    def _fp8_names(self) -> set[str]:
        """Local names of what the engines hold as FP8, whether this rank sends it or another that holds it too."""
        held = pieces(self.trainer.spec, self.layout, self.rank)
        return {piece.local_name for piece in held if piece.hf_name in self.fp8}

    def _gather_digests(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        started = time.perf_counter()
        own = self._digester(parameters)
        self._digest_seconds = time.perf_counter() - started
        return merge_digests(from_all(own))
