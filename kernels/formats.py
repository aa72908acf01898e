"""The precision contract in constants: formats, scale policies, edge rules. Nothing here imports torch.

E4M3 (`torch.float8_e4m3fn`): 1 sign, 4 exponent and 3 mantissa bits, largest finite value 448, smallest positive
2**-9, no infinity. A tensor in FP8 is a pair: *codes* (E4M3, the true shape) and *scale* (FP32, one number for each
block), with `value = code * scale`. The scale stored is always the one to multiply by (the "inverse scale" of others).

| tensor            | block (rows x columns) | scale shape for [R, C]         |
|-------------------|------------------------|--------------------------------|
| weight [out, in]  | 128 x 128              | [ceil(R/128), ceil(C/128)]     |
| activation, dY    | 1 x 128                | [R, ceil(C/128)]               |
| operands of wgrad | 128 x 1                | [ceil(R/128), C]               |

Scale policies, for a block whose largest magnitude is `amax`:
* `pow2`: the smallest power of two not under `amax / 448`, from the exponent bits of `amax` (exact).
* `fp32`: `amax / 448` correctly rounded; codes are `x / scale`, a true division.

Edge rules:
* `amax` is floored at `AMAX_FLOOR`, so that every scale is a normal FP32 number and so is its reciprocal. Above the
  floor the rule is the formula, to the bit; below it (zero blocks included) the scale is `MIN_SCALE` = 2**-126.
* A block that holds NaN or Inf gets scale NaN and codes 0: the fault travels with the scale (a few bytes for each
  block, so that looking for it is cheap), and any product with the block is NaN.
* Sides that 128 does not divide: codes at the true shape; the last block is smaller; padding never enters `amax`.
"""

from __future__ import annotations

from typing import Literal, get_args

BLOCK = 128
"""Side of a weight tile, length of an activation group, tokens in a wgrad group."""

E4M3_MAX = 448.0
"""Largest finite E4M3 value, 1.75 * 2**8."""

MIN_SCALE = 2.0**-126
"""Smallest normal FP32 number; the scale of a zero block."""

AMAX_FLOOR = E4M3_MAX * MIN_SCALE
"""Below this (5.3e-36) the scale is `MIN_SCALE`. Far under any gradient: token-normalized ones live near 1e-10."""

ScalePolicy = Literal["pow2", "fp32"]
SCALE_POLICIES: tuple[str, ...] = get_args(ScalePolicy)


def check_policy(policy: str) -> None:
    """Raise ValueError unless `policy` is one of `SCALE_POLICIES`."""
    if policy not in SCALE_POLICIES:
        raise ValueError(f"scale policy {policy!r} is not one of {', '.join(SCALE_POLICIES)}")


def blocks(n: int) -> int:
    """Number of 128-blocks that cover `n` elements: ceil(n / 128)."""
    return -(-n // BLOCK)


def scale_shape(rows: int, cols: int) -> tuple[int, int]:
    """Shape of the scale tensor of a [rows, cols] weight: one number for each 128x128 tile."""
    return blocks(rows), blocks(cols)
