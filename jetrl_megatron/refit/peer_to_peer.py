"""Weights between nodes: each rectangle goes straight from the trainer rank that holds it to where an engine reads it.

Large rectangles that are contiguous at both ends go from tensor to tensor. The others go in packs: a pack is copied
into one of two buffers while the pack before it is on the wire, and likewise at the receiving end, so copying and
sending overlap, and no member needs more buffer memory than `refit.staging_mib`.

With `refit.delta` each sender keeps what it sent. Of each pack it first sends which strips of 32 bytes have changed
(one byte each), then only those; the whole pack where they are more than nine in ten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_conversion.planner import Plan
from jetrl_megatron.refit.packs import (
    STRIP,
    Far,
    Pack,
    Whole,
    deliver,
    drain,
    fill,
    gather,
    load_copies,
    schedule,
    source_of,
    target_of,
)
from jetrl_megatron.refit.peers import Peers, TransferFailed
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.rectangles import Copies, copy
from jetrl_megatron.refit.transports import Moved, Target

BUFFERS = 2
"""Packs under way in each direction."""
UNBUFFERED = 4
"""Straight packs under way. NCCL has room for few operations: when a peer dies, starting one more waits for ever."""
PAYS = 0.9
"""A pack goes whole when more than this share of it has changed."""
HEADER = 8
"""Bytes of the version that a delta builds on, before the strips' marks."""


class PeerToPeer:
    """One member's part in moving a version.

    Args:
        far: which (trainer rank, destination rank) pairs go this way.
        staging_bytes: bound of this member's buffers, over both directions.
        chunk_of: chunk of each parameter, where landing places hold a part of a version at a time.
        whole: which rectangles are contiguous at both ends; a delta needs all in packs.
        delta: send what has changed; needs landing places that hold a whole version.
    """

    def __init__(
        self,
        plan: Plan,
        places: Places,
        member: int,
        *,
        far: Far,
        staging_bytes: int,
        device: torch.device,
        chunk_of: Mapping[str, int] | None = None,
        whole: Whole | None = None,
        delta: bool = False,
    ):
        if delta and chunk_of is not None:
            raise ValueError("a delta needs landing places that hold a whole version")
        self.places, self.member, self.device, self.delta = places, member, device, delta
        self.limit = staging_bytes // (2 * BUFFERS)
        self.packs = schedule(plan, places, member, self.limit, far, chunk_of, None if delta else whole)
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._copies: dict[tuple, tuple[tuple[int, ...], Copies]] = {}

    @functools.cached_property
    def _buffers(self) -> dict[bool, list[Tensor]]:
        """Buffers for sending and for receiving, as large as the largest pack needs; made at the first transfer."""
        largest: dict[bool, int] = {}
        for pack in self.packs:
            if not pack.straight and not self._local(pack):
                sending = pack.src == self.member
                largest[sending] = max(largest.get(sending, 0), pack.nbytes)
        load_copies(self.device)
        return {k: [self._memory(n) for _ in range(BUFFERS)] for k, n in largest.items()}

    @property
    def staging(self) -> int:
        """Bytes of buffers in use."""
        return sum(buffer.nbytes for pair in self._buffers.values() for buffer in pair)

    @property
    def kept(self) -> int:
        """Bytes of the last version that a delta is taken against."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def exchange(
        self,
        peers: Peers | None,
        tensors: Mapping[str, Tensor],
        target: Target | None,
        *,
        base: int | None = None,
        chunk: int = 0,
    ) -> Moved:
        """See `Transport.exchange`."""
        if self.delta:
            return self._exchange_delta(peers, tensors, target, base)
        moved, transfers = Moved(), _Ring(peers, self._buffers)
        for pack in self._chunk(peers, chunk):
            if self._local(pack):
                assert target is not None
                copy(deliver(pack, tensors, target))
            elif pack.src == self.member:
                receiver = self.places.receiver(pack.dst)
                if pack.straight:
                    transfers.straight(True, source_of(pack, tensors), receiver)
                else:
                    buffer = transfers.free(True)[: pack.nbytes]
                    self._copy(fill, pack, buffer, tensors, lambda item: tensors[item.source])
                    transfers.send(buffer, receiver)
                moved += Moved(pack.payload, pack.nbytes)
            elif pack.straight:
                assert target is not None
                transfers.straight(False, target_of(pack, target), pack.src)
            else:
                assert target is not None
                buffer = transfers.free(False)[: pack.nbytes]
                transfers.receive(buffer, pack.src, functools.partial(self._drain, pack, buffer, target))
        transfers.finish()
        return moved

    def _drain(self, pack: Pack, buffer: Tensor, target: Target) -> None:
        self._copy(drain, pack, buffer, target, lambda item: target(pack.dst, item.target))

    def _copy(self, plan: Callable[..., Copies], pack: Pack, buffer: Tensor, at: Any, tensor_of: Callable) -> None:
        """Copy what `plan` says; its hundreds of views are made once, as long as nothing moves."""
        where = (buffer.data_ptr(), *(tensor_of(item).data_ptr() for item in pack.items))
        if self._copies.get((plan, pack.key), (None,))[0] != where:
            self._copies[plan, pack.key] = where, plan(pack, buffer, at)
        copy(self._copies[plan, pack.key][1])

    def forget(self) -> None:
        """Keep no view of tensors that were copied."""
        self._copies.clear()

    def _exchange_delta(
        self, peers: Peers | None, tensors: Mapping[str, Tensor], target: Target | None, base: int | None
    ) -> Moved:
        moved, transfers = Moved(), _Ring(peers, self._buffers)
        marks: list[tuple[Pack, Tensor]] = []
        for pack in self._chunk(peers, 0):
            if self._local(pack):
                assert target is not None
                copy(deliver(pack, tensors, target))
                continue
            header = self._memory(HEADER + pack.nbytes // STRIP)
            marks.append((pack, header))
            if pack.src == self.member:
                fresh = transfers.free(True)[: pack.nbytes].zero_()  # gaps between rectangles count as unchanged
                copy(fill(pack, fresh, tensors))
                kept = self._kept.setdefault(pack.key, torch.zeros_like(fresh))
                _mark(header, fresh, kept, -1 if base is None else base)
                transfers.send(header, self.places.receiver(pack.dst))
                moved.wire += header.nbytes
            else:
                transfers.receive(header, pack.src, functools.partial(_expect, header, base))
        transfers.finish()
        for pack, header in marks:
            changed = header[HEADER:].bool()
            whole = base is None or float(changed.float().mean()) > PAYS
            size = pack.nbytes if whole else int(changed.sum()) * STRIP
            if pack.src == self.member:
                moved += Moved(pack.payload, size)
                if size:
                    buffer, kept = transfers.free(True)[:size], self._kept[pack.key]
                    buffer.copy_(kept if whole else kept.view(-1, STRIP)[changed].view(-1))
                    transfers.send(buffer, self.places.receiver(pack.dst))
            elif size:
                assert target is not None
                buffer = transfers.free(False)[:size]
                place = functools.partial(self._drain, pack, buffer, target)
                patch = functools.partial(_patch, pack, buffer, changed, target)
                transfers.receive(buffer, pack.src, place if whole else patch)
        transfers.finish()
        return moved

    def _chunk(self, peers: Peers | None, chunk: int) -> Iterator[Pack]:
        """The chunk's packs whose receivers take part."""
        for pack in self.packs:
            receiver = self.places.receiver(pack.dst)
            if pack.chunk == chunk and (peers is None or receiver in peers.members):
                yield pack

    def _local(self, pack: Pack) -> bool:
        return pack.src == self.member == self.places.receiver(pack.dst)

    def _memory(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)


class _Ring:
    """Operations under way: sends and receives in buffers, which are reused when their operation is done, oldest first,
    and those without a buffer (None)."""

    def __init__(self, peers: Peers | None, buffers: Mapping[bool, list[Tensor]]):
        self.peers, self.buffers = peers, buffers
        self.busy: dict[bool | None, list[tuple[dist.Work, Callable[[], None] | None]]]
        self.busy = {None: [], True: [], False: []}
        self.turn = {True: 0, False: 0}

    def free(self, sending: bool) -> Tensor:
        """A buffer that nothing uses any more."""
        if len(self.busy[sending]) >= BUFFERS:
            self._finish_oldest(sending)
        self.turn[sending] += 1
        return self.buffers[sending][self.turn[sending] % BUFFERS]

    def send(self, buffer: Tensor, to: int) -> None:
        assert self.peers is not None
        self.busy[True].append((self.peers.send(buffer, to), None))

    def receive(self, buffer: Tensor, sender: int, then: Callable[[], None]) -> None:
        assert self.peers is not None
        self.busy[False].append((self.peers.receive(buffer, sender), then))

    def straight(self, sending: bool, tensor: Tensor, peer: int) -> None:
        """Send or receive without a buffer."""
        assert self.peers is not None
        if len(self.busy[None]) >= UNBUFFERED:
            self._finish_oldest(None)
        self.busy[None].append(((self.peers.send if sending else self.peers.receive)(tensor, peer), None))

    def finish(self) -> None:
        for kind, operations in self.busy.items():
            while operations:
                self._finish_oldest(kind)

    def _finish_oldest(self, kind: bool | None) -> None:
        assert self.peers is not None
        work, then = self.busy[kind].pop(0)
        self.peers.finish(work)
        if then is not None:
            then()


def _mark(header: Tensor, fresh: Tensor, kept: Tensor, base: int) -> None:
    """Fill a header: the base version, then 1 for each changed strip; `kept` becomes `fresh`."""
    header[:HEADER].view(torch.int64).fill_(base)
    header[HEADER:].copy_((fresh.view(-1, STRIP) != kept.view(-1, STRIP)).any(1))
    kept.copy_(fresh)


def _expect(header: Tensor, base: int | None) -> None:
    found = int(header[:HEADER].view(torch.int64))
    if found != (-1 if base is None else base):
        raise TransferFailed(f"a delta on version {found}, and this receiver holds {base}")


def _patch(pack: Pack, strips: Tensor, changed: Tensor, target: Target) -> None:
    """Put changed strips over what the receiver holds of a pack."""
    whole = torch.zeros(pack.nbytes, dtype=torch.uint8, device=strips.device)
    copy(gather(pack, whole, target))
    whole.view(-1, STRIP)[changed] = strips.view(-1, STRIP)
    copy(drain(pack, whole, target))
