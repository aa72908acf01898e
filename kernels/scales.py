"""Scales from block maxima, and quantization given a scale: the arithmetic that all quantizers share.

Reference forms in plain torch, for any device. Source: the precision contract in `formats.py`; `pow2` is OCP MX's
E8M0 "round up", done on exponent bits because `ceil(log2(x))` is off by one beside powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_kernels.formats import AMAX_FLOOR, E4M3_MAX, check_policy

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_MANTISSA_1_75 = 0x600000  # mantissa field of 1.75, which is 448 / 2**8


class NonFiniteError(ValueError):
    """Tensors hold NaN or Inf. `names` lists them."""

    def __init__(self, names: list[str]):
        self.names = names
        super().__init__(f"NaN or Inf in {', '.join(names)}")


def pow2_ceil(x: Tensor) -> Tensor:
    """Smallest power of two that is >= x, for positive normal FP32 `x`; exact, on exponent bits."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + _MANTISSA_MASK) & ~_MANTISSA_MASK).view(torch.float32)


def scale_from_amax(amax: Tensor, policy: str = "pow2") -> Tensor:
    """Dequantization scale of blocks with the given maxima.

    Args:
        amax: FP32, any shape, >= 0 (NaN and Inf allowed).
        policy: `pow2` or `fp32`.

    Returns:
        FP32 of the same shape, finite and >= 2**-126; NaN exactly where `amax` is NaN or Inf.
    """
    check_policy(policy)
    amax = amax.float()
    floored = amax.clamp(min=AMAX_FLOOR)
    if policy == "pow2":
        # amax = m * 2**e, 448 = 1.75 * 2**8: the quotient is (m / 1.75) * 2**(e - 8), so round up iff m > 1.75.
        bits = floored.contiguous().view(torch.int32)
        exponent = (bits >> _MANTISSA_BITS) - 8 + ((bits & _MANTISSA_MASK) > _MANTISSA_1_75).int()
        scale = (exponent << _MANTISSA_BITS).view(torch.float32)
    else:
        scale = floored / E4M3_MAX
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def quantize_with_scale(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of `x` (any float) for `scale` (FP32, broadcastable): round(x / scale) to nearest even, saturating.

    Under `pow2` the division is exact (but for results far under the smallest code), so that a kernel may multiply by
    the reciprocal instead. Where the scale is NaN the code is 0.
    """
    scaled = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(torch.isnan(scale), 0.0, scaled).to(torch.float8_e4m3fn)


def has_nonfinite(scale: Tensor) -> Tensor:
    """Whether the tensor behind `scale` held NaN or Inf: a 0-dim bool on its device, without a host sync."""
    return torch.isnan(scale).any()


def refuse_nonfinite(scales: dict[str, Tensor]) -> None:
    """Raise NonFiniteError naming every tensor whose scale says that it held NaN or Inf. One host sync for all."""
    if not scales:
        return
    flags = torch.stack([has_nonfinite(s) for s in scales.values()])
    bad = [name for name, flag in zip(scales, flags.tolist()) if flag]
    if bad:
        raise NonFiniteError(bad)
