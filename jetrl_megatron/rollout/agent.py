"""The other end of `remote.py`: starts the engines of one node and passes requests on to them.

It lives in the first trainer rank of the node or, where there are no trainers, in the node's host process.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.config import Config
from jetrl_megatron.refit.places import Places
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.pool import EnginePool, engines_on
from jetrl_megatron.rollout.remote import Address, Name, dial
from jetrl_megatron.rollout.types import EngineDied, EngineError

ENGINE_METHODS = frozenset("wait_ready expose refit accept generate sleep restart close".split())


@contextlib.contextmanager
def replicas(
    model_dir: Path, config: Config, quantized: Collection[str], output: Path, device: torch.device, places: Places
) -> Iterator[EnginePool | None]:
    """This rank's part in the run's replicas: the pool on rank 0, an agent on the first rank of other nodes that
    sample, nothing elsewhere. Engines start at once. Collective over trainer ranks."""
    rank = dist.get_rank()
    address: list[Any] = [None]
    node = places.trainers[rank]
    with contextlib.ExitStack() as stack:
        pool = None
        if rank == 0:
            pool = EnginePool.of(model_dir, config, quantized, output, device, places)
            stack.callback(pool.close)
            pool.start()
            address = [pool.hub.address if pool.hub is not None else None]
        if set(places.replicas) != {0}:
            dist.broadcast_object_list(address, src=0)
        if node and places.trainers.index(node) == rank and places.on(node):
            engines = engines_on(node, model_dir, config, quantized, output, device, places)
            agent = Agent(engines, lambda: address[0], config.rollout.start_timeout_s)
            stack.callback(agent.close)
        yield pool


class Agent:
    """Engines of one node; a thread for each waits for requests.

    Args:
        address: of the first trainer rank, asked again at each attempt to connect.
        timeout_s: how long to try.
    """

    def __init__(self, engines: Sequence[RolloutEngine], address: Callable[[], Address], timeout_s: float):
        self.engines = list(engines)
        for engine in self.engines:
            engine.start()
        self._threads = [
            threading.Thread(target=self._serve, args=(e, address, timeout_s), name=f"engine-{e.replica}", daemon=True)
            for e in self.engines
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, engine: RolloutEngine, address: Callable[[], Address], timeout_s: float) -> None:
        try:
            serve(engine, ENGINE_METHODS, connect(address, ("engine", engine.replica), timeout_s))
        finally:
            engine.close()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def connect(address: Callable[[], Address], name: Name, timeout_s: float) -> Connection:
    """Connect to the first trainer rank, which may come up later than this process.

    Raises:
        EngineDied: it did not come up in `timeout_s`.
    """
    deadline, why = time.monotonic() + timeout_s, "no address"
    while time.monotonic() < deadline:
        try:
            return dial(address(), name)
        except (OSError, EOFError, AuthenticationError, ValueError) as error:  # also the file of an earlier run
            why = f"{type(error).__name__}: {error}"
            time.sleep(0.5)
    raise EngineDied(
        f"{' '.join(map(str, name))}: the first trainer rank cannot be reached in {timeout_s:.0f} s ({why})"
    )


def serve(target: Any, methods: frozenset[str], connection: Connection) -> bool:
    """Answer requests for methods of `target` until `close` (True) or until the connection ends (False)."""
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return False
        try:
            if method not in methods:
                raise EngineError(f"no method {method!r}")
            answer = ("ok", getattr(target, method)(*arguments))
        except Exception as error:
            answer = ("error", _sendable(error))
        try:
            connection.send(answer)
        except OSError:
            return False
        if method == "close":
            return True


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
