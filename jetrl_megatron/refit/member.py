"""One member's end of a refit: where bytes land, what it sends and receives, and its connections to the others.

Trainer ranks and host processes alike. Nothing here knows Megatron or vLLM: tensors come by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from jetrl_conversion.layout import Layout, local_shapes
from jetrl_conversion.model_spec import ModelSpec
from jetrl_conversion.planner import plan_reshard
from jetrl_megatron.config import RefitConfig
from jetrl_megatron.refit.ipc import CudaSegment, published
from jetrl_megatron.refit.message import TensorSlot, plan_slots, segment_bytes
from jetrl_megatron.refit.packs import Item
from jetrl_megatron.refit.peer_to_peer import PeerToPeer
from jetrl_megatron.refit.peers import Peers, Store
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.rectangles import copies, copy
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
        self.spec, self.places, self.member, self.device, self.config = spec, places, member, device, config
        target = Layout("vllm", tp=replica.tp, ep=replica.ep, dp=len(places.copies))
        nodes = (places.trainers, places.destinations)
        self.plan = plan_reshard(spec, source, target, fp8=bool(fp8), nodes=nodes)
        self.ways = Ways(self.plan, places, device.type)
        self.pulled = {dst for dst in range(target.world) if self.ways.pulled(dst)}
        self.placed = {dst for dst in range(target.world) if self.ways.placed(dst)}
        # On a CPU a landing place is shared memory and keeps the whole version, so that a replica that restarts finds
        # it there. A GPU has no room for that: bytes land in the engine's own parameters or, where it sleeps and these
        # cannot be mapped, chunks of a version pass through.
        self.whole = tuple(plan_slots(spec, replica, rank, fp8) for rank in range(replica.world))
        self.chunks = 1
        if device.type == "cuda" and len(self.pulled | self.placed) < target.world:
            self.chunks = -(-segment_bytes(self.whole[0]) // (config.staging_mib * MIB // 2))
        self.slots = tuple(plan_slots(spec, replica, rank, fp8, self.chunks) for rank in range(replica.world))
        # A parameter larger than a chunk leaves fewer for the others.
        self.chunks = 1 + max(slot.chunk for held in self.slots for slot in held)
        self._by_name = [{slot.name: slot for slot in held} for held in self.slots]
        self.landing: dict[int, Segment | CudaSegment] = {}
        self._owned: list[Segment | CudaSegment] = []
        self._views: dict[tuple[int, str], Tensor] = {}
        self.parameters: dict[int, list[Mapping[str, Tensor]]] = {}
        """Of each placed destination rank, the parameters of that rank of every replica of this node."""
        self._tables: dict[str, dict[str, Tensor]] = {}
        self._shapes: dict[tuple[Layout, int], dict[str, tuple[int, ...]]] = {}
        self.peer_to_peer = PeerToPeer(
            self.plan,
            places,
            member,
            far=self.ways.packed,
            staging_bytes=config.staging_mib * MIB,
            device=device,
            chunk_of={s.name: s.chunk for s in self.slots[0]} if self.chunks > 1 else None,
            whole=self._contiguous,
            # What an engine that was started again has in its parameters is no version.
            delta=config.delta and self.chunks == 1 and not self.placed,
        )
        self.transports: list[Transport] = [SharedMemory(self.plan, self.ways, member), self.peer_to_peer]
        self.peers: Peers | None = None

    @property
    def receives(self) -> list[int]:
        """Destination ranks whose bytes this member puts in their places, its own or engines' parameters."""
        world = range(self.plan.dst.world)
        return [dst for dst in world if self.places.receiver(dst) == self.member and dst not in self.pulled]

    def _contiguous(self, src: int, dst: int, item: Item) -> bool:
        """See `packs.Whole`. False for scales, which are small."""
        ends = (self.plan.src, src, item.source), (self.plan.dst, dst, item.target)
        return all(self._width(layout, rank, name) == item.size[1] for layout, rank, name in ends)

    def _width(self, layout: Layout, rank: int, name: str) -> int:
        """Columns of a parameter, 1 if it has one dimension; 0: no parameter."""
        if (layout, rank) not in self._shapes:
            self._shapes[layout, rank] = local_shapes(self.spec, layout, rank)
        shape = self._shapes[layout, rank].get(name, (0, 0))
        return shape[-1] if len(shape) > 1 else 1

    def open(self) -> dict[int, str]:
        """Make this member's landing places.

        Returns:
            Destination rank -> its segment, as `RefitMessage.segments` names it.
        """
        for dst in self.receives:
            if dst in self.placed:
                continue
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

    def adopt(self, tables: Mapping[int, Sequence[str]]) -> None:
        """Map the parameters of engines of this node that bytes are placed in, each once.

        Args:
            tables: for each of `receives` that is placed, that rank's table of every replica (`ipc.publish`).

        Raises:
            SegmentError: a table that cannot be opened.
        """
        used = {path for dst in self.receives for path in tables.get(dst, ())}
        if gone := self._tables.keys() - used:
            # A view would keep the memory of an engine that is gone, which its successor needs.
            self.peer_to_peer.forget()
            self.parameters = {}
        for path in gone:
            del self._tables[path]
        for path in used - self._tables.keys():
            self._tables[path] = published(path)
        self.parameters = {dst: [self._tables[p] for p in tables[dst]] for dst in self.receives if dst in tables}

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
        """Move one chunk of a version, by every way; see `Transport.exchange`. When it returns the bytes are there."""
        moved, target = Moved(), self.view if self.landing or self.parameters else None
        if self.chunks > 1:
            # What pads the vocabulary is nobody's, and another chunk's bytes lie there.
            for dst in self.landing:
                slots = self.slots[dst % self.places.tp]
                torch._foreach_zero_([self.view(dst, s.name).view(torch.uint8) for s in slots if s.chunk == chunk])
        for transport in self.transports:
            moved += transport.exchange(self.peers, tensors, target, base=base, chunk=chunk)
        for first, *others in self.parameters.values():
            for other in others:
                copy(copies((other[name], first[name]) for name in first))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return moved

    def view(self, dst: int, name: str) -> Tensor:
        """A parameter, where a destination rank's bytes land."""
        if dst in self.parameters:
            return self.parameters[dst][0][name]
        if (dst, name) not in self._views:
            self._views[dst, name] = self.landing[dst].view(self.slot(dst, name))
        return self._views[dst, name]

    def slot(self, dst: int, name: str) -> TensorSlot:
        return self._by_name[dst % self.places.tp][name]

    def close(self) -> None:
        self.leave()
        for segment in self._owned:
            segment.unlink()
