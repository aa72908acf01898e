"""Philox-4x32-10 and stochastic rounding in plain torch (int64 arithmetic on 32-bit words)."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MUL_A, _MUL_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def _mul_hi_lo(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of 32-bit words, without leaving int64."""
    low = a * (b & 0xFFFF)  # < 2**48
    high = a * (b >> 16) + (low >> 16)  # < 2**49
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: Tensor, words: tuple[int, int], key: tuple[int, int]) -> list[Tensor]:
    """Philox-4x32-10 (Salmon et al., SC'11): four int64 tensors of 32 random bits each.

    Args:
        counter: int64, the low 64 bits of the counter. words: its upper two 32-bit words. key: two 32-bit words.
    """
    c = [counter & _MASK, (counter >> 32) & _MASK, torch.full_like(counter, words[0] & _MASK)]
    c.append(torch.full_like(counter, words[1] & _MASK))
    k0, k1 = key[0] & _MASK, key[1] & _MASK
    for _ in range(10):
        hi_b, lo_b = _mul_hi_lo(c[2], _MUL_B)
        hi_a, lo_a = _mul_hi_lo(c[0], _MUL_A)
        c = [hi_b ^ c[1] ^ k0, lo_b, hi_a ^ c[3] ^ k1, lo_a]
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c


def random_16(index: Tensor, key: tuple[int, int, int]) -> Tensor:
    """16 random bits (int64) for each global element index: eight elements share one Philox block."""
    seed, step, tensor_id = key
    block = philox(index >> 3, (step, tensor_id), (seed, 0))
    lane = index & 7
    word = torch.stack(block).gather(0, (lane >> 1).unsqueeze(0)).squeeze(0)
    return (word >> (16 * (lane & 1))) & 0xFFFF


def stochastic(master: Tensor, key: tuple[int, int, int], row0: int, col0: int, global_cols: int) -> Tensor:
    """BF16 [rows, cols] of FP32 [rows, cols]: add 16 random bits below the BF16 mantissa, then truncate."""
    rows, cols = master.shape
    device = master.device
    row = torch.arange(row0, row0 + rows, dtype=torch.int64, device=device)[:, None]
    index = row * global_cols + torch.arange(col0, col0 + cols, dtype=torch.int64, device=device)
    bits = master.contiguous().view(torch.int32).long() & _MASK
    rounded = (bits + random_16(index, key)) >> 16
    truncated = bits >> 16
    # A finite number must stay finite: where the carry reached Inf's exponent, truncate.
    rounded = torch.where((rounded & 0x7F80) == 0x7F80, truncated, rounded)
    value = (rounded << 16).to(torch.int64)
    signed = torch.where(value >= 1 << 31, value - (1 << 32), value).to(torch.int32)
    result = signed.view(torch.float32).to(torch.bfloat16)
    return torch.where(torch.isfinite(master), result, master.to(torch.bfloat16))
