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
Copies = tuple[list[Tensor], list[Tensor]]
"""Targets and their sources, uint8: what `copy` takes, to be kept where it is copied again and again."""


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
    """The bytes of (target, source) views, pair by pair of equal size."""
    found = [(target.view(torch.uint8), source.view(torch.uint8)) for target, source in pairs]
    return [target for target, _ in found], [source for _, source in found]


def copy(made: Copies) -> None:
    """Copy bytes from each source to its target; on a GPU in few launches."""
    torch._foreach_copy_(*made)
