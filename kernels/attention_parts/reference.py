"""The merge as tensor operations: the kernel's sums in the kernel's order."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_parts(
    parts: Tensor, lse: Tensor, lengths: Tensor, part: int, own_last: bool, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `attention_parts.merge_parts`; any dtype, sums in the dtype of `lse`."""
    planes, dtype = parts.shape[0], lse.dtype
    count = (lengths.long() + part - 1) // part
    there = torch.arange(planes, device=parts.device)[:, None] < count  # [P, T]
    at = torch.arange(planes, device=parts.device)[:, None].expand(planes, count.shape[0])
    if own_last:
        at = torch.where(at == count - 1, planes - 1, at)
    lse = lse.gather(0, at[:, None, :].expand(lse.shape)).masked_fill(~there[:, None], -math.inf)
    largest = lse.amax(0)
    weights = torch.exp2((lse - largest) * math.log2(math.e)).masked_fill(~there[:, None], 0.0)
    above = below = None
    for p in range(planes):
        x = parts.gather(0, at[p][None, :, None, None].expand(1, *parts.shape[1:]))[0].to(dtype)
        w = weights[p].t()[..., None]
        x = torch.where(there[p][:, None, None], w * x, 0.0)
        above, below = (x, w) if above is None else (above + x, below + w)
    assert above is not None and below is not None
    nothing = (count == 0)[:, None, None]
    result = torch.where(nothing, 0.0, above / below).to(parts.dtype)
    total = torch.where(nothing[:, 0, 0], 0.0, largest + torch.log(below[..., 0]).t())
    if out is None:
        return result, total
    return out.copy_(result), total
