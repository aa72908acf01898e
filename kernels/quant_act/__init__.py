"""Quantize activations and gradients to E4M3: 1x128 groups along rows, 128x1 groups along columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_kernels.quant_act import reference

__all__ = ["dequant_act", "dequant_act_cols", "quant_act", "quant_act_both", "quant_act_cols"]


def _as_bf16(x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise ValueError(f"activations to quantize are [tokens, channels], not of shape {tuple(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"activations to quantize are bfloat16 or float32, not {x.dtype}")
    return x.detach().to(torch.bfloat16)


def _implementation(x: Tensor) -> Any:
    if not x.is_cuda:
        return reference
    from jetrl_kernels.quant_act import kernel

    return kernel


def quant_act(x: Tensor, policy: str = "pow2") -> tuple[Tensor, Tensor]:
    """Row-wise FP8 of an activation, the operand of FProp and DGrad.

    Args:
        x: [tokens, channels], BF16 (FP32 is rounded to BF16 first).
        policy: `pow2` or `fp32`.

    Returns:
        codes E4M3 [tokens, channels] and scale FP32 [tokens, ceil(channels/128)]. The scale's memory is column-major
        (stride 1 along tokens, columns padded to 4 tokens), which is what DeepGEMM and cuBLASLt read.
        A group with NaN or Inf has scale NaN and codes 0.
    """
    return _implementation(x).quant_act(_as_bf16(x), policy)


def quant_act_cols(x: Tensor, policy: str = "pow2") -> tuple[Tensor, Tensor]:
    """Column-wise FP8 (groups of 128 tokens of one channel), the operand of WGrad, stored transposed.

    Returns:
        codes E4M3 [channels, tokens] (the GEMM sums over tokens and wants them contiguous) and
        scale FP32 [ceil(tokens/128), channels].
    """
    return _implementation(x).quant_act_cols(_as_bf16(x), policy)


def quant_act_both(x: Tensor, policy: str = "pow2") -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`(quant_act(x), quant_act_cols(x))` from one read of `x`."""
    x = _as_bf16(x)
    if x.is_cuda:
        return _implementation(x).quant_act_both(x, policy)
    return reference.quant_act(x, policy), reference.quant_act_cols(x, policy)


def dequant_act(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[tokens, channels] of `dtype` from row-wise codes and scale."""
    return reference.dequant_act(codes, scale, dtype)


def dequant_act_cols(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[tokens, channels] of `dtype` from column-wise codes [channels, tokens] and scale."""
    return reference.dequant_act(codes, scale.t(), dtype).t()
