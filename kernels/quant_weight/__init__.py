"""Quantize a weight to E4M3 with one scale for each 128x128 tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_kernels.formats import check_policy, scale_shape
from jetrl_kernels.quant_weight import reference

__all__ = ["QuantizedWeight", "dequant_weight", "quant_weight"]


@dataclass(slots=True)
class QuantizedWeight:
    """A weight in FP8: what travels, what is digested, what the GEMMs read.

    codes: E4M3 [out, in]. scale: FP32 [ceil(out/128), ceil(in/128)], `value = code * scale`.
    codes_t: the same bytes as [in, out], contiguous, for a DGrad that wants them so; None where nobody asked.
    """

    codes: Tensor
    scale: Tensor
    codes_t: Tensor | None = None

    def __post_init__(self) -> None:
        want = scale_shape(*self.codes.shape)
        if tuple(self.scale.shape) != want:
            raise ValueError(
                f"weight codes {tuple(self.codes.shape)} need a scale of shape {want}, not {tuple(self.scale.shape)}"
            )


def quant_weight(w: Tensor, policy: str = "pow2", transposed: bool = False) -> QuantizedWeight:
    """FP8 bytes of a weight. FP32 input is rounded to BF16 (nearest even) first: always through BF16.

    Args:
        w: [out, in], BF16 or FP32.
        policy: scale policy, `pow2` or `fp32`.
        transposed: also emit the codes as [in, out] (same bytes, no second rounding).

    Returns:
        QuantizedWeight. A tile with NaN or Inf has scale NaN: see `scales.refuse_nonfinite`.

    Raises:
        ValueError: `w` is not 2-D or the policy is unknown. TypeError: a dtype other than BF16 and FP32.
    """
    if w.dim() != 2:
        raise ValueError(f"quant_weight takes [out, in], not a tensor of shape {tuple(w.shape)}")
    if w.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"quant_weight takes bfloat16 or float32, not {w.dtype}")
    check_policy(policy)
    if w.is_cuda:
        from jetrl_kernels.quant_weight import kernel

        return QuantizedWeight(*kernel.quantize_tiles(w.detach(), policy, transposed=transposed))
    codes, scale = reference.quant_weight(w.detach(), policy)
    return QuantizedWeight(codes, scale, codes.t().contiguous() if transposed else None)


def dequant_weight(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`code * scale` as `dtype` [out, in]. Exact in BF16 for a `pow2` scale."""
    return reference.dequant_weight(codes, scale, dtype)
