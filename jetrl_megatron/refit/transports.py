"""The ways of weights from a trainer rank to where an engine reads them, and which one a pair takes.

| way | between | the engine reads |
|---|---|---|
| `shm` | CPUs of one node | a segment that trainer ranks write into |
| `gloo` | CPUs of two nodes | a segment that the copy's receiver fills |
| `cuda-ipc` | GPUs of one node | the trainer's own buffers |
| `nccl` | GPUs, where part of a copy comes from another node | on nodes without trainers nothing: bytes land in its |
| | | parameters. Elsewhere the receiver's buffer, one chunk after another |

All four obey the same plan, carry the same messages, and end in the same comparison of digests.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from jetrl_conversion.planner import Plan
from jetrl_megatron.refit.peers import Peers
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.rectangles import pairs

Name = Literal["shm", "gloo", "cuda-ipc", "nccl"]
Target = Callable[[int, str], Tensor]
"""(destination rank, parameter) -> the whole tensor where an engine reads it."""


class Way(NamedTuple):
    name: Name
    reason: str


@dataclass
class Moved:
    """What one member sent for one version."""

    payload: int = 0
    """Bytes of weights that the plan asks for, without gaps."""
    wire: int = 0
    """Bytes that left the node: less with a delta, more by the gaps between rectangles."""

    def __iadd__(self, other: Moved) -> Moved:
        self.payload, self.wire = self.payload + other.payload, self.wire + other.wire
        return self


class Transport(Protocol):
    """One member's part in one way: everything that it sends or receives for the pairs that take this way."""

    def exchange(
        self,
        peers: Peers | None,
        tensors: Mapping[str, Tensor],
        target: Target | None,
        *,
        base: int | None = None,
        chunk: int = 0,
    ) -> Moved:
        """Move one chunk of a version. All members at once.

        Args:
            peers: connections to the other members; None where there are none.
            tensors: this trainer rank's parameters; empty on other members.
            target: landing places that this member reaches; None where it reaches none.
            base: version that landing places hold whole, of which only the difference need be sent; None: everything.

        Raises:
            TransferFailed: landing places hold part of the new version, part of the old.
        """
        ...


class Ways:
    """Which way each pair of (trainer rank, destination rank) takes.

    A GPU engine either reads all its bytes from trainers of its node, by CUDA IPC, or gets them all by NCCL.
    """

    def __init__(self, plan: Plan, places: Places, device: str):
        self.places, self.device = places, device
        world = range(plan.dst.world)
        self.sources = {dst: {t.src_rank for t in plan.receives(dst)} for dst in world} if device == "cuda" else {}

    def of(self, src: int, dst: int) -> Way:
        node, at = self.places.destinations[dst], self.places.trainers[src]
        if self.device != "cuda":
            if node == at:
                return Way("shm", f"both on node {node}")
            return Way("gloo", f"node {at} and node {node} share no memory")
        strange = {self.places.trainers[s] for d in self._copy(dst) for s in self.sources[d]} - {node}
        if not strange:
            return Way("cuda-ipc", f"all that node {node} needs is on its own GPUs")
        return Way("nccl", f"node {node} needs bytes of node {', '.join(map(str, sorted(strange)))}")

    def packed(self, src: int, dst: int) -> bool:
        """Whether the pair's bytes travel in packs."""
        return self.of(src, dst).name in ("gloo", "nccl")

    def pulled(self, dst: int) -> bool:
        """Whether the engine reads the trainers' own buffers, and nothing lands anywhere."""
        return self.device == "cuda" and self.of(0, dst).name == "cuda-ipc"

    def placed(self, dst: int) -> bool:
        """Whether bytes land in the engine's own parameters: on GPUs of a node without trainers, where none sleeps."""
        node = self.places.destinations[dst]
        return self.device == "cuda" and node not in self.places.trainers and not self.pulled(dst)

    def _copy(self, dst: int) -> range:
        first = dst // self.places.tp * self.places.tp
        return range(first, first + self.places.tp)


class SharedMemory:
    """Trainer ranks write their rectangles into the segments of their own node."""

    def __init__(self, plan: Plan, ways: Ways, member: int):
        sends = plan.sends(member) if member < len(ways.places.trainers) else []
        self.transfers = [t for t in sends if ways.of(member, t.dst_rank).name == "shm"]

    def exchange(
        self,
        peers: Peers | None,
        tensors: Mapping[str, Tensor],
        target: Target | None,
        *,
        base: int | None = None,
        chunk: int = 0,
    ) -> Moved:
        for transfer in self.transfers:
            assert target is not None
            for source, place in pairs(transfer, tensors, target):
                place.copy_(source)
        return Moved(sum(t.nbytes for t in self.transfers))


def m2n() -> tuple[bool, str]:
    """Whether NVIDIA's M2N copies (nccl-extensions) are installed, and why they are not used."""
    try:
        found = importlib.util.find_spec("nccl.m2n") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        return False, "nccl.m2n is not installed: between nodes NCCL sends each rectangle"
    return True, "nccl.m2n is installed and not used: it was never run with these layouts, NCCL sends each rectangle"
