"""What travels between two ranks of different nodes, cut into packs: contiguous buffers of bounded size.

A large rectangle that is contiguous at both ends (most of a model) is a pack of its own that needs no buffer.

Every rank derives the packs that it sends or receives from the plan, in one order that is the same on all ranks, so
that nothing is negotiated and no two ranks ever wait for each other in a circle: of all packs that are not done, the
first in the order has both its ends ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_conversion.planner import Plan, Transfer
from jetrl_megatron.refit.message import SCALE_SUFFIX
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.rectangles import Copies, Rectangle, copies, copy, cut, parts

STRIP = 32
"""Bytes compared, and sent, as one in a delta. Packs are whole strips long.

Not a tile: a step of 1e-6 on weights of standard deviation 0.02 changes 0.4 % of the codes and something in every tile,
but only 12 % of the strips (computed with `quant_weight`; docs/refit.md)."""
ALIGN = 16
"""Each rectangle starts at a multiple of this many bytes of its pack."""
STRAIGHT = 1 << 20
"""Least bytes of a rectangle that goes from tensor to tensor. Smaller ones cost less in a pack than a send each."""


class Item(NamedTuple):
    """A rectangle in a pack, row by row from byte `offset` on."""

    source: str
    source_at: Rectangle
    size: Rectangle
    target: str
    target_at: Rectangle
    offset: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.size[0] * self.size[1] * self.itemsize


class Pack(NamedTuple):
    """Rectangles from trainer rank `src` for destination rank `dst`; all their targets are in slots of `chunk`."""

    src: int
    dst: int
    chunk: int
    index: int
    nbytes: int
    items: tuple[Item, ...]
    straight: bool = False
    """Its only rectangle goes from tensor to tensor, without a buffer."""

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Names the pack among all."""
        return self[:4]

    @property
    def payload(self) -> int:
        """Bytes of weights, without the gaps between rectangles."""
        return sum(item.nbytes for item in self.items)


Far = Callable[[int, int], bool]
"""Whether what a trainer rank has for a destination rank goes into packs."""
Whole = Callable[[int, int, Item], bool]
"""(trainer rank, destination rank, rectangle) -> whether the rectangle is contiguous at both ends."""


def schedule(
    plan: Plan,
    places: Places,
    member: int,
    limit: int,
    far: Far,
    chunk_of: Mapping[str, int] | None = None,
    whole: Whole | None = None,
) -> list[Pack]:
    """The packs that `member` sends or receives, in the order that all members keep.

    Args:
        limit: most bytes of a pack.
        far: which pairs of (trainer rank, destination rank) use packs; those without `far` share memory.
        chunk_of: chunk of each target parameter; one chunk where it is None.
        whole: large rectangles for which it is true become straight packs; all go through buffers where it is None.

    Raises:
        ValueError: one row of a rectangle is longer than `limit`.
    """
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    if member < len(places.trainers):
        for transfer in plan.sends(member):
            if far(member, transfer.dst_rank):
                pairs.setdefault((member, transfer.dst_rank), []).append(transfer)
    for dst in range(plan.dst.world):
        if places.receiver(dst) != member:
            continue
        for transfer in plan.receives(dst):
            if transfer.src_rank != member and far(transfer.src_rank, dst):
                pairs.setdefault((transfer.src_rank, dst), []).append(transfer)
    count = plan.dst.world
    cap = limit // STRIP * STRIP
    packs = [pack for pair, held in pairs.items() for pack in _cut(pair, held, cap, chunk_of, whole)]
    # Turned by the source's number, each of many sources begins with another destination.
    return sorted(packs, key=lambda p: (p.chunk, p.index, (p.dst - p.src) % count, p.src, p.dst))


def _cut(
    pair: tuple[int, int],
    held: Iterable[Transfer],
    limit: int,
    chunk_of: Mapping[str, int] | None,
    whole: Whole | None,
) -> Iterator[Pack]:
    by_chunk: dict[int, list[Item]] = {}
    for transfer in held:
        for source, source_at, size, target, target_at in parts(transfer):
            itemsize = 4 if target.endswith(SCALE_SUFFIX) else 1 if transfer.quantized else 2
            chunk = chunk_of[target] if chunk_of else 0
            by_chunk.setdefault(chunk, []).append(Item(source, source_at, size, target, target_at, 0, itemsize))
    for chunk, items in by_chunk.items():
        straight = [i for i in items if whole is not None and i.nbytes >= STRAIGHT and whole(*pair, i)]
        for index, item in enumerate(straight):
            yield Pack(*pair, chunk, index, item.nbytes, (item,), straight=True)
        taken = set(straight)
        yield from _pack(pair, chunk, [i for i in items if i not in taken], limit, len(straight))


def _pack(pair: tuple[int, int], chunk: int, items: list[Item], limit: int, index: int) -> Iterator[Pack]:
    found: list[Item] = []
    used = 0
    for item in items:
        row, done = item.size[1] * item.itemsize, 0
        if row > limit:
            raise ValueError(f"{item.target}: a row of {row} bytes does not fit a buffer of {limit}: refit.staging_mib")
        while done < item.size[0]:
            rows = min(item.size[0] - done, (limit - used) // row)
            if rows:
                found.append(_rows(item, done, rows, used))
                used += -(-rows * row // ALIGN) * ALIGN
                done += rows
            if used >= limit or not rows:
                yield Pack(*pair, chunk, index, min(limit, -(-used // STRIP) * STRIP), tuple(found))
                found, index, used = [], index + 1, 0
    if found:
        yield Pack(*pair, chunk, index, -(-used // STRIP) * STRIP, tuple(found))


def _rows(item: Item, first: int, count: int, offset: int) -> Item:
    (source, source_col), (target, target_col) = item.source_at, item.target_at
    return item._replace(
        source_at=(source + first, source_col),
        target_at=(target + first, target_col),
        size=(count, item.size[1]),
        offset=offset,
    )


def source_of(pack: Pack, tensors: Mapping[str, Tensor]) -> Tensor:
    """The bytes of a straight pack at its sender, uint8."""
    (item,) = pack.items
    return cut(tensors[item.source], item.source_at, item.size).view(-1).view(torch.uint8)


def target_of(pack: Pack, target: Callable[[int, str], Tensor]) -> Tensor:
    """Where the bytes of a straight pack belong at its receiver, uint8."""
    ((_, place),) = _places(pack, target)
    return place.view(-1).view(torch.uint8)


def fill(pack: Pack, buffer: Tensor, tensors: Mapping[str, Tensor]) -> Copies:
    """Of a pack's rectangles, out of a trainer rank's tensors into the uint8 `buffer`."""
    return copies(
        (_inside(buffer, i, tensors[i.source]), cut(tensors[i.source], i.source_at, i.size)) for i in pack.items
    )


def drain(pack: Pack, buffer: Tensor, target: Callable[[int, str], Tensor]) -> Copies:
    """Of a pack's rectangles to their places; `target(destination rank, name)` is the whole tensor there."""
    return copies((place, _inside(buffer, item, place)) for item, place in _places(pack, target))


def gather(pack: Pack, buffer: Tensor, target: Callable[[int, str], Tensor]) -> Copies:
    """The reverse of `drain`: a pack as its receiver holds it now."""
    return [(parts, places) for places, parts in drain(pack, buffer, target)]


def deliver(pack: Pack, tensors: Mapping[str, Tensor], target: Callable[[int, str], Tensor]) -> Copies:
    """Of a pack whose sender is its receiver: from tensor to tensor."""
    return copies((place, cut(tensors[i.source], i.source_at, i.size)) for i, place in _places(pack, target))


def load_copies(device: torch.device) -> None:
    """Have the kernels of `rectangles.copy` on a GPU.

    CUDA loads a kernel at its first launch and waits for all that runs: behind a send to a dead peer that is for ever.
    """
    if device.type == "cuda":
        one, other = torch.zeros((2, 64, 64), dtype=torch.uint8, device=device)
        words, bytes_ = (one, other), (one.view(-1)[1:], other.view(-1)[1:])
        copy(copies([words, words, bytes_, bytes_, (one[:, :32], other[:, 32:]), (one[:, :31], other[:, 32:63])]))
        torch.cuda.synchronize(device)


def _places(pack: Pack, target: Callable[[int, str], Tensor]) -> Iterator[tuple[Item, Tensor]]:
    for item in pack.items:
        yield item, cut(target(pack.dst, item.target), item.target_at, item.size)


def _inside(buffer: Tensor, item: Item, like: Tensor) -> Tensor:
    """The rectangle in a pack, with the dtype and number of dimensions of `like`."""
    flat = buffer[item.offset : item.offset + item.nbytes].view(like.dtype)
    return flat if like.dim() == 1 else flat.view(item.size)
