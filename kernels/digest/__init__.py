"""A 64-bit digest of raw bytes, keyed by global position: the same for a tensor and for the sum of its shards.

`digest = sum over bytes (value + 1) * key(row, byte offset in the row)  mod 2**64`, with
`key = R[row] * (C[offset // 4] << 8 * (offset % 4))`, R and C odd 64-bit numbers from splitmix64 of the position. It is
linear in each byte, hence additive over any disjoint shards, and a moved byte meets another key. `value + 1` lets
zeros count, so a missing zero row shows. It finds accidents (swapped heads, rows, scales; flipped bytes) and is no
cryptography.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_kernels import cuda_lib
from jetrl_kernels.digest import reference

__all__ = ["Digests", "Shard", "combine", "digest", "digest_tensor"]

_MASK = (1 << 64) - 1


def digest(t: Tensor, *, row0: int = 0, col0: int = 0, global_cols: int | None = None) -> int:
    """Digest of `t`'s bytes as an int in [0, 2**64). Waits for the device; see `digest_tensor`.

    Args:
        t: [rows, cols] of any dtype; 1-D is one row. A shard of a global tensor, any strides.
        row0, col0: position of its first element in the global tensor (for 1-D: only `col0`).
        global_cols: columns of the global tensor, to check that the shard lies within.

    Raises:
        ValueError: more than 2 dimensions, a negative offset, or columns outside of `global_cols`.
    """
    return int(digest_tensor(t, row0=row0, col0=col0, global_cols=global_cols).item()) & _MASK


def digest_tensor(t: Tensor, *, row0: int = 0, col0: int = 0, global_cols: int | None = None) -> Tensor:
    """As `digest`, but a 0-dim int64 (the same 64 bits) on `t`'s device, without waiting for it."""
    t = _matrix(t, row0, col0, global_cols)
    if t.is_cuda:
        from jetrl_kernels.digest import kernel

        return kernel.digest_tensor(t, row0, col0)
    return reference.digest_tensor(t, row0, col0)


class Shard(NamedTuple):
    """A shard of a tensor, at its place there; see `digest`."""

    tensor: int
    """Number of the tensor that it belongs to."""
    t: Tensor
    row0: int
    col0: int
    global_cols: int


class Digests:
    """Digests of tensors from shards that stay where they are, to be taken time after time.

    On a Hopper GPU all of them together cost a few launches, and one wait.

    Args:
        shards: disjoint ones of tensors 0 to `count` - 1, all on one device; elements of a row are contiguous.

    Raises:
        ValueError: as `digest`, and rows that are not contiguous.
    """

    def __init__(self, shards: Iterable[Shard], count: int):
        self._shards = [s._replace(t=_matrix(s.t, s.row0, s.col0, s.global_cols)) for s in shards]
        self._count, self._many = count, None
        if torn := [s for s in self._shards if s.t.stride(1) != 1 and s.t.shape[1] > 1]:
            raise ValueError(f"elements of a row lie {torn[0].t.stride(1)} apart, not side by side")
        filled = [s for s in self._shards if s.t.numel()]
        if filled and filled[0].t.is_cuda and cuda_lib.available():
            from jetrl_kernels.digest import kernel

            # A single column may have any stride between its elements.
            raw = [(s, s.t.as_strided(s.t.shape, (s.t.stride(0), 1)).view(torch.uint8)) for s in filled]
            parts = [(s.tensor, t, s.row0, s.col0 * s.t.element_size()) for s, t in raw]
            self._many = kernel.Many(parts, count, filled[0].t.device)

    def __call__(self) -> list[int]:
        """The digest of each tensor, of the bytes that its shards hold now. Waits for the device."""
        if self._many is not None:
            return [value & _MASK for value in self._many().tolist()]
        found = [0] * self._count
        for tensor, t, row0, col0, _ in self._shards:
            found[tensor] = combine([found[tensor], digest(t, row0=row0, col0=col0)])
        return found


def _matrix(t: Tensor, row0: int, col0: int, global_cols: int | None) -> Tensor:
    """`t` as [rows, cols]. Raises ValueError: it does not lie within a tensor of `global_cols` columns."""
    t = t.detach()
    if t.dim() <= 1:
        t = t.reshape(1, -1)
    if t.dim() != 2:
        raise ValueError(f"digest takes one or two dimensions, not {tuple(t.shape)}")
    if row0 < 0 or col0 < 0:
        raise ValueError(f"digest offsets must not be negative: row0={row0}, col0={col0}")
    if global_cols is not None and col0 + t.shape[1] > global_cols:
        raise ValueError(f"columns {col0}..{col0 + t.shape[1]} lie outside of a tensor of {global_cols} columns")
    return t


def combine(parts: list[int]) -> int:
    """Digest of the whole from those of its disjoint shards."""
    return sum(parts) & _MASK
