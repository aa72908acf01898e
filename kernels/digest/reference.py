"""The digest in plain torch: int64 arithmetic wraps modulo 2**64, which is what is wanted."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

ROW_SEED = 0x243F6A8885A308D3
COL_SEED = 0x13198A2E03707344


def _signed(x: int) -> int:
    """The int64 with the same 64 bits."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: Tensor, n: int) -> Tensor:
    """Logical shift (int64 shifts copy the sign bit)."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def keys(start: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Odd int64 keys [count] of positions start, start + 1, ...: splitmix64 (Steele, Lea, Flood 2014)."""
    gamma = _signed(0x9E3779B97F4A7C15)
    x = (torch.arange(start, start + count, dtype=torch.int64, device=device) + 1) * gamma + _signed(seed)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift_right(x, 31)) | 1


@functools.lru_cache(maxsize=64)
def byte_keys(first: int, count: int, device: torch.device) -> Tensor:
    """Column keys [count] of single bytes first, first + 1, ... of a row."""
    words = keys(first // 4, (first + count - 1) // 4 - first // 4 + 1, COL_SEED, device)
    offsets = torch.arange(first, first + count, device=device)
    return words[offsets // 4 - first // 4] << (8 * (offsets % 4))


def digest_tensor(t: Tensor, row0: int, col0: int) -> Tensor:
    """0-dim int64 digest of [rows, cols] at (row0, col0)."""
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    if t.numel() == 0:
        return total
    row_keys = keys(row0, t.shape[0], ROW_SEED, t.device)
    column_keys = byte_keys(col0 * t.element_size(), t.shape[1] * t.element_size(), t.device)
    rows_at_once = max(1, (1 << 22) // column_keys.numel())  # bounds the int64 copy to 32 MiB
    for start in range(0, t.shape[0], rows_at_once):
        piece = t[start : start + rows_at_once].clone(memory_format=torch.contiguous_format)
        values = piece.view(torch.uint8).long() + 1
        total += ((values * column_keys).sum(1) * row_keys[start : start + rows_at_once]).sum()
    return total
