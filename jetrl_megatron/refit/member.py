"""One member's end of a refit: where bytes land, what it sends and receives, and its connections to the others.

Trainer ranks and host processes alike. Nothing here knows Megatron or vLLM: tensors come by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from jetrl_conversion.layout import Layout
from jetrl_conversion.model_spec import ModelSpec
from jetrl_conversion.planner import plan_reshard
from jetrl_megatron.config import RefitConfig
from jetrl_megatron.refit.ipc import CudaSegment
from jetrl_megatron.refit.message import TensorSlot, plan_slots, segment_bytes
from jetrl_megatron.refit.peer_to_peer import PeerToPeer
from jetrl_megatron.refit.peers import Peers, Store
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.shm import Segment
from jetrl_megatron.refit.transports import Moved, SharedMemory, Transport, Ways

MIB = 1 << 20


class Member:
    """
    Args:
        source: the trainer's layout. replica: the layout of one replica.
        fp8: Hugging Face names of the tensors that both layouts hold as FP8; empty: everything travels as BF16.
        member: this process's number, see `Places`.
        device: where this member's tensors and landing places are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: Layout,
        replica: Layout,
        fp8: Collection[str],
        places: Places,
        member: int,
        device: torch.device,
        config: RefitConfig,
    ):
        self.places, self.member, self.device, self.config = places, member, device, config
        target = Layout("vllm", tp=replica.tp, ep=replica.ep, dp=len(places.copies))
        nodes = (places.trainers, places.destinations)
        self.plan = plan_reshard(spec, source, target, fp8=bool(fp8), nodes=nodes)
        self.ways = Ways(self.plan, places, device.type)
        self.pulled = {dst for dst in range(target.world) if self.ways.pulled(dst)}
        # On a CPU a landing place is shared memory and keeps the whole version, so that a replica that restarts finds
        # it there. A GPU has no room for that: chunks of a version pass through.
        self.whole = tuple(plan_slots(spec, replica, rank, fp8) for rank in range(replica.world))
        self.chunks = 1
        if device.type == "cuda" and len(self.pulled) < target.world:
            self.chunks = -(-segment_bytes(self.whole[0]) // (config.staging_mib * MIB))
        self.slots = tuple(plan_slots(spec, replica, rank, fp8, self.chunks) for rank in range(replica.world))
        # A parameter larger than a chunk leaves fewer for the others.
        self.chunks = 1 + max(slot.chunk for held in self.slots for slot in held)
        self._by_name = [{slot.name: slot for slot in held} for held in self.slots]
        self.landing: dict[int, Segment | CudaSegment] = {}
        self._owned: list[Segment | CudaSegment] = []
        self._views: dict[tuple[int, str], Tensor] = {}
        self.peer_to_peer = PeerToPeer(
            self.plan,
            places,
            member,
            far=self.ways.packed,
            staging_bytes=config.staging_mib * MIB,
            device=device,
            chunk_of={s.name: s.chunk for s in self.slots[0]} if self.chunks > 1 else None,
            delta=config.delta and self.chunks == 1,
        )
        self.transports: list[Transport] = [SharedMemory(self.plan, self.ways, member), self.peer_to_peer]
        self.peers: Peers | None = None

    @property
    def receives(self) -> list[int]:
        """Destination ranks whose bytes land at this member."""
        world = range(self.plan.dst.world)
        return [dst for dst in world if self.places.receiver(dst) == self.member and dst not in self.pulled]

    def open(self) -> dict[int, str]:
        """Make this member's landing places.

        Returns:
            Destination rank -> its segment, as `RefitMessage.segments` names it.
        """
        for dst in self.receives:
            nbytes = segment_bytes(self.slots[dst % self.places.tp])
            if self.device.type == "cuda":
                segment = CudaSegment.create(nbytes, self.device)
            else:
                segment = Segment.create(nbytes, f"engine{dst}")
            self.landing[dst] = segment
            self._owned.append(segment)
        return {dst: str(segment.path) for dst, segment in self.landing.items()}

    def attach(self, segments: Mapping[int, str]) -> None:
        """Map landing places of the same node that another member made and this one writes into."""
        if self.device.type == "cuda":
            return
        for dst, path in segments.items():
            if dst not in self.landing and self.places.destinations[dst] == self.places.node(self.member):
                self.landing[dst] = Segment.attach(path)

    def join(self, store: Store, members: Sequence[int], epoch: int) -> None:
        """Connect to the other members; collective, see `Peers`."""
        self.leave()
        self.peers = Peers(store, members, self.member, epoch, self.device)

    def leave(self) -> None:
        """Give up the connections."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None

    @torch.no_grad()
    def exchange(self, tensors: Mapping[str, Tensor], *, base: int | None = None, chunk: int = 0) -> Moved:
        """Move one chunk of a version, by every way; see `Transport.exchange`."""
        moved, target = Moved(), self.view if self.landing else None
        if self.chunks > 1:
            # What pads the vocabulary is nobody's, and another chunk's bytes lie there.
            for segment in self._owned:
                segment.bytes.zero_()
        for transport in self.transports:
            moved += transport.exchange(self.peers, tensors, target, base=base, chunk=chunk)
        return moved

    def view(self, dst: int, name: str) -> Tensor:
        """A parameter's slot in the landing place of a destination rank."""
        if (dst, name) not in self._views:
            self._views[dst, name] = self.landing[dst].view(self.slot(dst, name))
        return self._views[dst, name]

    def slot(self, dst: int, name: str) -> TensorSlot:
        return self._by_name[dst % self.places.tp][name]

    def close(self) -> None:
        self.leave()
        for segment in self._owned:
            segment.unlink()
