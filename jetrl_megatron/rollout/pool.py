"""The replicas of one run, on trainer rank 0: work is split over them, and one that dies is replaced once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from jetrl_megatron.config import Config
from jetrl_megatron.errors import RunError
from jetrl_megatron.refit.digests import differing
from jetrl_megatron.refit.message import RefitMessage
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.types import Completion, EngineDied, Sampling

T = TypeVar("T")
Digests = Mapping[str, int] | Future[Mapping[str, int]]
log = logging.getLogger(__name__)


class RefitMismatch(RunError):
    """After loading, an engine does not hold the trainer's bytes. `names` lists the tensors."""

    def __init__(self, replica: int, names: Sequence[str]):
        self.names = list(names)
        shown = ", ".join(self.names[:8]) + (f" and {len(self.names) - 8} more" if len(self.names) > 8 else "")
        super().__init__(f"refit: engine {replica} does not hold the trainer's bytes of {shown}")


def engine_devices(config: Config, replica: int, count: int) -> list[str]:
    """CUDA devices of a replica, as CUDA_VISIBLE_DEVICES takes them.

    Colocated replicas share the trainers' GPUs from the first on; others come after them, and also see the first
    trainer's GPU (last, so that they never allocate on it), whose memory a refit reads.

    Raises:
        ValueError: the host has too few GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if visible != [""] else [str(i) for i in range(count)]
    first = replica * config.rollout.tp + (0 if config.rollout.colocated else config.parallel.world_size)
    devices = names[first : first + config.rollout.tp]
    if len(devices) < config.rollout.tp:
        where = "the trainers' GPUs" if config.rollout.colocated else "GPUs beside the trainers'"
        raise ValueError(f"replica {replica} needs {config.rollout.tp} of {where}, and this host shows {len(names)}")
    return devices if config.rollout.colocated else [*devices, names[0]]


class EnginePool:
    """All replicas, at one version of the weights.

    The segments keep the bytes of the current version until the next refit, so that a fresh engine can be brought to
    it without the trainer: an engine that dies is restarted and refitted, once for every version.
    """

    def __init__(self, engines: Sequence[RolloutEngine]):
        self.engines = list(engines)
        self._message: RefitMessage | None = None
        self._digests: Digests = {}
        self._replaced: set[int] = set()

    @staticmethod
    def of(
        model_dir: Path, config: Config, quantized: Collection[str], output: Path, device: torch.device
    ) -> EnginePool:
        """`rollout.replicas` engines for this model, not started yet; logs go into `output`."""
        cpu = device.type == "cpu"
        return EnginePool(
            [
                RolloutEngine(
                    model_dir,
                    config,
                    quantized=quantized,
                    output=output,
                    replica=replica,
                    cpu=cpu,
                    devices=None if cpu else engine_devices(config, replica, torch.cuda.device_count()),
                )
                for replica in range(config.rollout.replicas)
            ]
        )

    def sleep(self) -> None:
        """Free the GPUs until the next `load`; nothing happens on a CPU or where engines have GPUs of their own."""
        self._each(lambda engine: engine.sleep())

    def start(self) -> None:
        """Start all processes and return at once; the first request waits for them."""
        for engine in self.engines:
            engine.start()

    def load(self, message: RefitMessage, digests: Digests) -> int:
        """Bring every replica to `message.version` and compare live bytes.

        Args:
            digests: the trainer's, by Hugging Face name, or their future: both sides can then digest at once.

        Returns:
            Number of tensors that differed, over all replicas.

        Raises:
            RefitMismatch: naming the tensors. EngineDied: for the second time.
        """
        self._message, self._digests = message, digests
        self._replaced.clear()
        return sum(self._each(self._refit))

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Completion]:
        """One answer to each prompt, in order; prompts are dealt to the replicas in runs of equal length.

        Raises:
            EngineDied: for the second time at this version. EngineError: see `RolloutEngine.generate`.
        """
        share = -(-len(prompts) // len(self.engines))

        def part(engine: RolloutEngine) -> list[Completion]:
            start = self.engines.index(engine) * share
            cut = slice(start, start + share)
            return engine.generate(prompts[cut], seeds[cut], sampling) if prompts[cut] else []

        return [completion for found in self._each(part) for completion in found]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def _each(self, action: Callable[[RolloutEngine], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.engines)) as threads:
            return list(threads.map(lambda engine: self._guarded(engine, action), self.engines))

    def _guarded(self, engine: RolloutEngine, action: Callable[[RolloutEngine], T]) -> T:
        try:
            return action(engine)
        except EngineDied as death:
            if engine.replica in self._replaced:
                raise
            self._replaced.add(engine.replica)
            log.warning("%s\nstarting it again", death)
            engine.restart()
            if self._message is not None and action != self._refit:
                self._refit(engine)
            return action(engine)

    def _refit(self, engine: RolloutEngine) -> int:
        assert self._message is not None
        theirs = engine.refit(self._message)
        ours = self._digests.result() if isinstance(self._digests, Future) else self._digests
        names = differing(ours, theirs)
        if names:
            raise RefitMismatch(engine.replica, names)
        return len(names)
