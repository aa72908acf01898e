"""The replicas of one run, as trainer rank 0 sees them: work is split over them, one that dies is replaced once."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from jetrl_megatron.config import Config
from jetrl_megatron.errors import RunError
from jetrl_megatron.refit.digests import differing
from jetrl_megatron.refit.message import PLACED, RefitMessage
from jetrl_megatron.refit.places import Places
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.remote import Hub, RemoteEngine, RemoteHost
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


def engine_devices(config: Config, index: int, count: int, trainers: bool = True) -> list[str]:
    """CUDA devices of a replica, as CUDA_VISIBLE_DEVICES takes them: its own, then the node's others.

    An engine never allocates on the others; it reads trainers' and receivers' memory there.

    Args:
        index: the replica's place among those of its node. count: GPUs of the node.
        trainers: whether trainers run on this node. Colocated replicas share their GPUs from the first on; others come
            after them.

    Raises:
        ValueError: the node has too few GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if visible != [""] else [str(i) for i in range(count)]
    taken = int(os.environ.get("LOCAL_WORLD_SIZE", config.parallel.world_size)) if trainers else 0
    first = index * config.rollout.tp + (0 if config.rollout.colocated else taken)
    devices = names[first : first + config.rollout.tp]
    if len(devices) < config.rollout.tp:
        where = "the trainers' GPUs" if config.rollout.colocated else "GPUs beside the trainers'"
        raise ValueError(
            f"replica {index} of this node needs {config.rollout.tp} of {where}, and this node shows {len(names)}"
        )
    return [*devices, *(name for name in names if name not in devices)]


def engines_on(
    node: int,
    model_dir: Path,
    config: Config,
    quantized: Collection[str],
    output: Path,
    device: torch.device,
    places: Places,
) -> list[RolloutEngine]:
    """The replicas of this node, not started yet; logs go into `output`."""
    cpu, trainers = device.type == "cpu", node in places.trainers
    return [
        RolloutEngine(
            model_dir,
            config,
            quantized=quantized,
            output=output,
            replica=replica,
            cpu=cpu,
            devices=None if cpu else engine_devices(config, index, torch.cuda.device_count(), trainers),
        )
        for index, replica in enumerate(places.on(node))
    ]


class EnginePool:
    """All replicas, at one version of the weights.

    An engine that dies is restarted and brought to the current version, once for every version: shared memory keeps
    that version's bytes. A replica that cannot be brought there (it dies again, its node is gone, its bytes came in
    chunks and are no longer anywhere) is out of rotation until the next version; the others take its prompts.

    Args:
        hub: where agents of other nodes connect to; None if all replicas are here.
        hosts: host processes of nodes without trainers, by their numbers as members of a refit.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine | RemoteEngine],
        hub: Hub | None = None,
        hosts: Mapping[int, RemoteHost] | None = None,
    ):
        self.engines, self.hub, self.hosts = list(engines), hub, dict(hosts or {})
        self._messages: Mapping[int, RefitMessage] = {}
        self._digests: Digests = {}
        self._replaced: set[int] = set()
        self._lost: dict[int, EngineDied] = {}

    @staticmethod
    def of(
        model_dir: Path,
        config: Config,
        quantized: Collection[str],
        output: Path,
        device: torch.device,
        places: Places | None = None,
    ) -> EnginePool:
        """`rollout.replicas` engines for this model, not started yet; logs go into `output`. All on this node unless
        `places` says otherwise."""
        places = places or Places((0,), (0,) * config.rollout.replicas, config.rollout.tp)
        here = {e.replica: e for e in engines_on(0, model_dir, config, quantized, output, device, places)}
        if set(places.replicas) == {0}:
            return EnginePool(list(here.values()))
        hub = Hub(os.environ.get("MASTER_ADDR", socket.gethostname()))
        if places.hosts:
            hub.publish(output)
        engines = [here.get(i) or RemoteEngine(i, node, hub, config) for i, node in enumerate(places.replicas)]
        first = len(places.trainers)
        hosts = {first + i: RemoteHost(first + i, node, hub, config) for i, node in enumerate(places.hosts)}
        return EnginePool(engines, hub, hosts)

    @property
    def serving(self) -> list[RolloutEngine | RemoteEngine]:
        """Replicas in rotation."""
        return [engine for engine in self.engines if engine.replica not in self._lost]

    def sleep(self) -> None:
        """Free the GPUs until the next `load`; nothing happens on a CPU or where engines have GPUs of their own."""
        self._each(self.serving, lambda engine: engine.sleep())

    def start(self) -> None:
        """Start all processes and return at once; the first request waits for them."""
        for engine in self.engines:
            engine.start()

    def load(self, message: RefitMessage | Mapping[int, RefitMessage], digests: Digests | None = None) -> int:
        """Bring replicas to a version and compare live bytes; until they are equal a replica serves nothing.

        Args:
            message: for all replicas, or for each by its number; replicas without one are out of rotation. Of a
                version in several chunks one chunk, in order.
            digests: the trainer's, by Hugging Face name, or their future: both sides can then digest at once. Needed
                with the last chunk.

        Returns:
            Number of tensors that differed, over all replicas.

        Raises:
            RefitMismatch: naming the tensors. EngineDied: no replica is left.
        """
        if isinstance(message, RefitMessage):
            message = {engine.replica: message for engine in self.engines}
        self._messages, self._digests = message, digests or {}
        if all(part.chunk == 0 and PLACED not in part.segments for part in message.values()):
            self._revive()
        for engine in self.serving:
            if engine.replica not in message:
                self._lose(engine, EngineDied(f"engine {engine.replica}: the new weights did not reach its node"))
        return sum(self._each(self.serving, self._refit).values())

    def expose(self, message: Mapping[int, RefitMessage]) -> dict[int, list[str]]:
        """Let replicas take a version into their parameters, as `load` will be told; until then they serve nothing.

        Returns:
            For each replica that is there, the tables of its ranks; see `RolloutEngine.expose`.

        Raises:
            EngineDied: no replica is left.
        """
        lost = {e.node for e in self.engines if e.replica in self._lost and isinstance(e, RemoteEngine)}
        for host in self.hosts.values():
            if host.node in lost:
                host.release()
        self._revive()
        engines = [engine for engine in self.serving if engine.replica in message]
        return self._each(engines, lambda engine: engine.expose(message[engine.replica]))

    def withdraw(self) -> None:
        """Landing places are about to be overwritten: an engine that dies now cannot be brought to their version."""
        self._messages = {}

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Completion]:
        """One answer to each prompt, in order; prompts are dealt to the replicas in runs of equal length.

        Raises:
            EngineDied: no replica is left. EngineError: see `RolloutEngine.generate`.
        """
        answers: dict[int, Completion] = {}
        while len(answers) < len(prompts):
            engines, todo = self.serving, [i for i in range(len(prompts)) if i not in answers]
            share = -(-len(todo) // max(1, len(engines)))
            parts = {e.replica: todo[n * share : (n + 1) * share] for n, e in enumerate(engines)}

            def part(engine: RolloutEngine | RemoteEngine, parts=parts) -> list[Completion]:
                mine = parts[engine.replica]
                return engine.generate([prompts[i] for i in mine], [seeds[i] for i in mine], sampling) if mine else []

            for replica, found in self._each(engines, part).items():
                answers.update(zip(parts[replica], found))
        return [answers[i] for i in range(len(prompts))]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for host in self.hosts.values():
            host.close()
        if self.hub is not None:
            self.hub.close()

    def _each(
        self,
        engines: Sequence[RolloutEngine | RemoteEngine],
        action: Callable[[RolloutEngine | RemoteEngine], T],
    ) -> dict[int, T]:
        """Results of the replicas that are in rotation afterwards.

        Raises:
            EngineDied: none is.
        """
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            futures = {engine.replica: threads.submit(self._guarded, engine, action) for engine in engines}
        found = {replica: future.result() for replica, future in futures.items()}
        if not self.serving:
            raise next(reversed(self._lost.values()))
        return {replica: value for replica, value in found.items() if replica not in self._lost}  # type: ignore[misc]

    def _guarded(
        self, engine: RolloutEngine | RemoteEngine, action: Callable[[RolloutEngine | RemoteEngine], T]
    ) -> T | None:
        """The action's result; None when the replica is out of rotation after it."""
        try:
            try:
                return action(engine)
            except EngineDied as death:
                message = self._messages.get(engine.replica)
                if engine.replica in self._replaced or message is None or not message.repeatable:
                    raise
                self._replaced.add(engine.replica)
                log.warning("%s\nstarting it again", death)
                engine.restart()
                if action != self._refit:
                    self._refit(engine)
                return action(engine)
        except EngineDied as death:
            self._lose(engine, death)
            return None

    def _lose(self, engine: RolloutEngine | RemoteEngine, death: EngineDied) -> None:
        self._lost[engine.replica] = death
        if self.serving:
            log.warning("%s\nreplica %d is out of rotation until the next version", death, engine.replica)

    def _revive(self) -> None:
        """A version begins: replicas that are out of rotation come back, in fresh processes, if they can."""
        self._replaced.clear()
        for engine in self.engines:
            if engine.replica in self._lost:
                try:
                    engine.restart()
                    del self._lost[engine.replica]
                except EngineDied as death:
                    self._lost[engine.replica] = death

    def _refit(self, engine: RolloutEngine | RemoteEngine) -> int:
        theirs = engine.refit(self._messages[engine.replica], True)
        if not theirs:
            return 0  # chunks are to come
        ours = self._digests.result() if isinstance(self._digests, Future) else self._digests
        names = differing(ours, theirs)
        if names:
            raise RefitMismatch(engine.replica, names)
        engine.accept()
        return len(names)
