"""How weights enter the engine: vLLM's weight-transfer backend `jetrl`, and the worker methods around it.

vLLM drives start, update (once for each chunk) and finish on every worker. All checks come before the first byte of
the model changes; then each parameter is overwritten in place, so its storage never moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from jetrl_conversion.layout import Layout
from jetrl_conversion.model_spec import load_model_spec
from jetrl_megatron.refit import ipc
from jetrl_megatron.refit.digests import Digester
from jetrl_megatron.refit.message import DTYPES, PLACED, RefitMessage, RefitRefused, check_slots, check_version
from jetrl_megatron.refit.rectangles import Copies, copies, copy
from jetrl_megatron.refit.shm import Segment

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class SegmentInit(WeightTransferInitInfo):
    """What never changes between versions."""

    scales: str
    """Scale policy of the engine's FP8 layers; `none` if it has none."""


@dataclass
class SegmentUpdate(WeightTransferUpdateInfo):
    message: dict[str, Any]
    """A `RefitMessage` as a dict."""


class SegmentWeightTransferEngine(WeightTransferEngine[SegmentInit, SegmentUpdate]):
    """Copies this worker's segment (shared memory, or a buffer on a GPU) into its live parameters.

    `version` is the version of the weights in memory: None before the first refit, and while (or after) a version
    of several chunks is only partly loaded.
    """

    init_info_cls = SegmentInit
    update_info_cls = SegmentUpdate

    def __init__(self, config, vllm_config, device, model: nn.Module):
        super().__init__(config, vllm_config, device, model)
        self.scales = "none"
        self.version: int | None = None
        self._last_version: int | None = None
        self._pending: RefitMessage | None = None
        self._segment: Segment | ipc.CudaSegment | None = None
        self._importer = ipc.Importer()
        self._sources: list[tuple[Tensor, Tensor]] = []
        self._copies: Copies = []
        self._padded: list[str] = []
        self._table: str | None = None
        self.digester: Digester | None = None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Live parameters by vLLM name; a tied head is not listed again."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def init_transfer_engine(self, init_info: SegmentInit) -> None:
        self.scales = init_info.scales

    def start_weight_update(self) -> None:
        self._pending = None

    @torch.no_grad()
    def receive_weights(self, update_info: SegmentUpdate) -> None:
        """Check one chunk, then copy it.

        Raises:
            RefitRefused: listing everything wrong with the message; the model's memory is unchanged.
        """
        message, sources = self.check(update_info.message)
        # From here on the old version is gone; the new one is whole when the last chunk has been copied.
        self._pending, self.version = message, None
        if message.segments[self.parallel_config.rank].startswith(ipc.PREFIX):
            live = self.parameters
            if self._sources is not sources:  # thousands of views, made once as long as nothing moves
                self._sources, self._copies = sources, copies(sources)
                self._padded = ipc.uncovered(sources, live)
            for name in self._padded:  # each time: an engine that slept woke to memory with anything in it
                live[name].zero_()
            copy(self._copies)
        else:
            for target, source in sources:
                target.copy_(source)

    def check(self, values: dict[str, Any]) -> tuple[RefitMessage, list[tuple[Tensor, Tensor]]]:
        """The message, and (part of a parameter, its new bytes) for its chunk. Changes nothing; raises as above."""
        try:
            message = RefitMessage.from_dict(values)
        except (KeyError, TypeError, ValueError) as error:
            raise RefitRefused([f"not a refit message: {error}"]) from error
        rank, ranks, live = self.parallel_config.rank, self.parallel_config.world_size, self.parameters
        problems = check_version(message, self._last_version, self.scales, ranks)
        known = self._pending is not None and message.same_version(self._pending)
        if rank < min(len(message.slots), len(message.segments)) and not (message.chunk and known):
            expected = {name: (_DTYPE_NAMES[p.dtype], tuple(p.shape)) for name, p in live.items()}
            problems += check_slots(message.slots[rank], expected, message.chunks)
        if message.chunk:  # chunk 0 begins a version, also after one that stayed unfinished
            due = 0 if self._pending is None else self._pending.chunk + 1
            if message.chunk != due:
                problems.append(f"chunk {message.chunk} of {message.chunks} came where chunk {due} was due")
            elif not known:
                problems.append("another version, or other slots, than the chunk before")
        if problems:
            raise RefitRefused(problems)
        try:
            if message.segments[rank] == PLACED:
                return message, []
            if message.segments[rank].startswith(ipc.PREFIX):
                return message, self._importer.pairs(message.segments[rank], rank, live)
            if self._segment is None or str(self._segment.path) != message.segments[rank]:
                kind = ipc.CudaSegment if message.segments[rank].startswith(ipc.SEGMENT) else Segment
                self._segment = kind.attach(message.segments[rank])
            slots = [slot for slot in message.slots[rank] if slot.chunk == message.chunk]
            return message, [(live[slot.name], self._segment.view(slot)) for slot in slots]
        except OSError as error:
            raise RefitRefused([str(error)]) from error

    @torch.no_grad()
    def expose(self) -> str:
        """Give up the version: others are about to write into the live parameters. Returns their table (`ipc.publish`).

        What nobody writes, the padding of the vocabulary, is zero.
        """
        self._pending = self.version = None
        if self._table is None:
            live = self.parameters
            for parameter in live.values():
                parameter.zero_()
            torch.cuda.synchronize()
            self._table = str(ipc.publish(live, f"engine-rank{self.parallel_config.rank}"))
        return self._table

    def finish_weight_update(self) -> None:
        """Give the loaded version its number; if chunks are missing there is none until a whole version has come."""
        message, self._pending = self._pending, None
        if message is not None and message.chunk + 1 == message.chunks:
            self.version = self._last_version = message.version

    def shutdown(self) -> None:
        self._segment = None
        self._importer = ipc.Importer()
        self._sources, self._copies = [], []

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        raise NotImplementedError("trainer ranks write segments themselves: see jetrl_megatron.refit")


class WorkerExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`), called through `collective_rpc`."""

    weight_transfer_engine: SegmentWeightTransferEngine
    vllm_config: Any

    def jetrl_version(self) -> int | None:
        return self.weight_transfer_engine.version

    def jetrl_check(self, message: dict[str, Any]) -> list[str]:
        """What is wrong with a message; asked of every worker before any worker loads it."""
        try:
            self.weight_transfer_engine.check(message)
        except RefitRefused as refused:
            return refused.problems
        return []

    def jetrl_expose(self) -> str:
        return self.weight_transfer_engine.expose()

    def jetrl_digests(self) -> dict[str, int]:
        """This worker's part of the digests of its live parameters (`rank_digests`)."""
        engine = self.weight_transfer_engine
        if engine.digester is None:
            spec = load_model_spec(self.vllm_config.model_config.model)
            layout = Layout("vllm", tp=engine.parallel_config.tensor_parallel_size)
            engine.digester = Digester(spec, layout, engine.parallel_config.rank)
        return engine.digester(engine.parameters)

    def jetrl_facts(self) -> dict[str, Any]:
        """What a trainer must share with this worker for equal log-probs."""
        facts: dict[str, Any] = {"threads": torch.get_num_threads()}
        for module in self.weight_transfer_engine.model.modules():
            if hasattr(module, "cos_sin_cache"):
                facts["rope"] = module.cos_sin_cache
            isa = getattr(getattr(module, "impl", None), "isa", None)
            if isa is not None:
                facts["attention_isa"] = isa
        return facts
