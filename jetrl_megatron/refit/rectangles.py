"""Copying the rectangles of a reshard plan between named tensors, scales along with their codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from jetrl_conversion.planner import Transfer
from jetrl_megatron.refit.message import SCALE_SUFFIX

Rectangle = tuple[int, int]
Part = tuple[str, Rectangle, Rectangle, str, Rectangle]
"""(source name, its start, size, target name, its start); starts and size in rows and columns."""
Copies = list[tuple[list[Tensor], list[Tensor]]]
"""Targets and their sources, alike within a group: what `copy` takes, to be kept where it is copied again and again."""
WORD = 8
"""Bytes that `copy` moves as one where it can."""


def parts(transfer: Transfer) -> list[Part]:
    """A transfer's codes (or BF16 elements) and, if it is FP8, its scales."""
    t = transfer
    found = [(t.src_local, t.src_start, t.size, t.dst_local, t.dst_start)]
    if t.quantized:
        source_at, target_at, size = t.scale
        found.append((t.src_local + SCALE_SUFFIX, source_at, size, t.dst_local + SCALE_SUFFIX, target_at))
    return found


def cut(tensor: Tensor, at: Rectangle, size: Rectangle) -> Tensor:
    """The rectangle of a 2-D tensor, or the run of a 1-D one (n x 1 to the plan); a view.

    vLLM stacks experts in 3-D, which count as their 2-D view.
    """
    if tensor.dim() == 3:
        tensor = tensor.flatten(0, 1)
    if tensor.dim() == 1:
        return tensor[at[0] : at[0] + size[0]]
    return tensor[at[0] : at[0] + size[0], at[1] : at[1] + size[1]]


def pairs(
    transfer: Transfer, sources: Mapping[str, Tensor], target: Callable[[int, str], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(source view, target view) of each part. `target(destination rank, name)` is the whole local tensor there."""
    for source, source_at, size, name, target_at in parts(transfer):
        yield cut(sources[source], source_at, size), cut(target(transfer.dst_rank, name), target_at, size)


def copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> Copies:
    """The bytes of (target, source) views, pair by pair of equal size.

    In groups, because torch copies a list in few launches only if all of it is contiguous and of one dtype; as words,
    because it would move single bytes at a fraction of the speed.
    """
    groups: dict[tuple[bool, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        ours = [tensor.view(torch.uint8) for tensor in (target, source)]
        whole = all(tensor.is_contiguous() for tensor in ours)
        if whole:
            ours = [tensor.view(-1) for tensor in ours]
        if all(_in_words(tensor) for tensor in ours):
            ours = [tensor.view(torch.int64) for tensor in ours]
        for side, tensor in zip(groups.setdefault((whole, ours[0].dtype), ([], [])), ours):
            side.append(tensor)
    return list(groups.values())


def copy(made: Copies) -> None:
    """Copy bytes from each source to its target; on a GPU in few launches."""
    for targets, sources in made:
        torch._foreach_copy_(targets, sources)


def _in_words(raw: Tensor) -> bool:
    """Whether uint8 rows can be seen as rows of words."""
    places = (raw.data_ptr(), raw.storage_offset(), raw.shape[-1], *raw.stride()[:-1])
    return raw.stride(-1) == 1 and not any(n % WORD for n in places)
