"""1x128 and 128x1 quantization in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetrl_kernels.formats import BLOCK, blocks
from jetrl_kernels.scales import quantize_with_scale, scale_from_amax


def quant_act(x: Tensor, policy: str) -> tuple[Tensor, Tensor]:
    """Codes E4M3 [rows, cols] and column-major scale FP32 [rows, ceil(cols/128)] of BF16 `x`."""
    rows, cols = x.shape
    groups = blocks(cols)
    x = pad(x.float(), (0, groups * BLOCK - cols)).view(rows, groups, BLOCK)
    scale = scale_from_amax(x.abs().amax(-1), policy)
    codes = quantize_with_scale(x, scale[..., None]).view(rows, groups * BLOCK)[:, :cols]
    return codes.contiguous(), column_major(scale)


def column_major(scale: Tensor) -> Tensor:
    """Same numbers, memory with stride 1 along rows and columns padded to a multiple of 4 (16 bytes)."""
    rows, groups = scale.shape
    out = scale.new_empty(groups, -(-rows // 4) * 4)[:, :rows].t()
    return out.copy_(scale)


def quant_act_cols(x: Tensor, policy: str) -> tuple[Tensor, Tensor]:
    """Codes E4M3 [cols, rows] and scale FP32 [ceil(rows/128), cols]: the row-wise form of x transposed."""
    codes, scale = quant_act(x.t(), policy)
    return codes, scale.t().contiguous()


def dequant_act(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`code * scale` in FP32, rounded to `dtype`."""
    per_element = scale.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return (codes.float() * per_element).to(dtype)
