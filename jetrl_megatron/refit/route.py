"""Who takes part in a refit, and what happens when somebody does not: connections made anew, one more attempt.

Trainer ranks agree by their own process group; host processes are told by the first rank, over their connection to the
pool. A version is announced to engines only after every member has said that its part arrived.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.collective import from_all
from jetrl_megatron.errors import RunError
from jetrl_megatron.refit.member import Member
from jetrl_megatron.refit.peers import Store, TransferFailed
from jetrl_megatron.refit.transports import Moved
from jetrl_megatron.rollout.pool import EnginePool
from jetrl_megatron.rollout.remote import RemoteHost
from jetrl_megatron.rollout.types import EngineError

Tables = Mapping[int, Sequence[str]]
"""For destination ranks whose bytes land in engines' parameters, the tables of these; see `Member.adopt`."""
Expose = Callable[[], Tables]
log = logging.getLogger(__name__)


class Route:
    """Collective over trainer ranks, all of it.

    Args:
        pool: on rank 0; None elsewhere.
    """

    def __init__(self, member: Member, pool: EnginePool | None):
        self.member, self.places = member, member.places
        self.hosts: Mapping[int, RemoteHost] = pool.hosts if pool is not None else {}
        self.segments: dict[int, str] = {}
        self.version: int | None = None
        """What all landing places hold, if they hold one version whole."""
        self._epoch, self._broken = 0, True
        self._members: dict[int, int] = {}
        """Members that are connected, and their `RemoteHost.process`: one that was started again knows nobody."""
        self._store: Store | None = None
        trainers = range(len(self.places.trainers))
        world = range(member.plan.dst.world)
        self.alone = not self.places.hosts and not any(member.ways.packed(s, d) for s in trainers for d in world)
        """Whether nothing leaves a node."""
        own = member.open()
        for part in from_all(own):
            self.segments |= part
        member.attach(self.segments)

    @property
    def reached(self) -> set[int]:
        """Nodes with replicas that take part."""
        ranks = len(self.places.trainers)
        missing = {self.places.node(m) for m in range(ranks, self.places.members) if m not in self._members}
        return set(self.places.copies) - missing

    def move(self, tensors: Mapping[str, Tensor], version: int, chunk: int, expose: Expose = dict) -> Moved:
        """Bring one chunk of a version to all landing places; a second attempt, over new connections, if one fails.

        Args:
            expose: asked before each attempt, on rank 0.

        Returns:
            What all trainer ranks sent.

        Raises:
            TransferFailed: also the second attempt failed; on every rank, with what each member says.
        """
        base = self.version if self.version is not None and self.version < version else None
        self.version = None
        for last in (False, True):
            tables = expose()
            problems = self._renew(tables)
            if problems:
                base = None
            if not self._broken:
                moved, problems = self._attempt(tensors, base, chunk, tables)
                if not problems:
                    self.version = version
                    return moved
            if last:
                raise TransferFailed(f"weights of version {version} did not arrive: " + "; ".join(problems))
            base, self._broken = None, True
            log.warning("weights of version %d did not arrive, trying once more: %s", version, "; ".join(problems))
        raise AssertionError

    def close(self) -> None:
        self.member.close()

    def _attempt(
        self, tensors: Mapping[str, Tensor], base: int | None, chunk: int, tables: Tables
    ) -> tuple[Moved, list[str]]:
        def mine() -> Moved:
            return self.member.exchange(tensors, base=base, chunk=chunk)

        found = self._together("exchange", (base, chunk, tables), mine)
        total = Moved()
        for moved, _ in found:
            total += moved or Moved()
        return total, [problem for _, problem in found if problem]

    def _renew(self, tables: Tables) -> list[str]:
        """Connect the members that are there, if they are others than before or a transfer failed. Returns problems.

        A host without an engine to receive for is not there."""
        if self.alone:
            self._broken = False
            return []
        segments: dict[int, str] = {}
        members = dict.fromkeys(range(len(self.places.trainers)), 0)
        for number, host in self.hosts.items():
            held = host.segments()
            due = {dst for dst in self.member.placed if self.places.receiver(dst) == number}
            if held is not None and due <= tables.keys():
                members[number] = host.process
                segments |= held
        box: list[Any] = [(members, segments)]
        dist.broadcast_object_list(box, src=0)
        chosen, segments = box[0]
        if not self._broken and chosen == self._members and segments.items() <= self.segments.items():
            return []
        self._members = chosen
        self.segments |= segments
        self._epoch += 1
        host, port = self._meet()
        connected = tuple(self._members)

        def mine() -> None:
            assert self._store is not None
            self.member.join(self._store, connected, self._epoch)

        problems = [p for _, p in self._together("join", (host, port, connected, self._epoch), mine) if p]
        self._broken = bool(problems)
        return problems or ["connections are new"]

    def _meet(self) -> tuple[str, int]:
        """Address of the store; made at the first call."""
        host, timeout = os.environ.get("MASTER_ADDR", "localhost"), self.member.config.timeout_s
        if dist.get_rank() == 0 and self._store is None:
            self._store = Store(host, 0, timeout, lead=True)
        box = [self._store.port if self._store is not None else 0]
        dist.broadcast_object_list(box, src=0)
        if self._store is None:
            self._store = Store(host, box[0], timeout, lead=False)
        return host, box[0]

    def _together(self, method: str, arguments: tuple, mine) -> list[tuple[Any, str]]:
        """Result and complaint of every trainer rank while the hosts do their part; theirs are rank 0's."""
        problems, asked = [], {}
        for number, host in self.hosts.items():
            if number in self._members:
                try:
                    host.begin(method, *arguments)
                    asked[number] = host
                except EngineError as error:
                    problems.append(str(error))
        result = None
        try:
            result = mine()
        except TransferFailed as error:
            problems.append(str(error))
        for number, host in asked.items():
            try:
                host.finish(method)
            except Exception as error:  # of whatever kind: the version did not arrive there
                known = isinstance(error, RunError)
                problems.append(str(error) if known else f"member {number}: {type(error).__name__}: {error}")
        return from_all((result, "; ".join(problems)))
