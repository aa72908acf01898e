"""128x128 weight quantization in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetrl_kernels.formats import BLOCK, blocks
from jetrl_kernels.scales import quantize_with_scale, scale_from_amax


def _expand(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Scale of every element: [rows, cols] from [ceil(rows/128), ceil(cols/128)]."""
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]


def quant_weight(w: Tensor, policy: str) -> tuple[Tensor, Tensor]:
    """Codes E4M3 [out, in] and scale FP32 [ceil(out/128), ceil(in/128)] of a BF16 or FP32 weight."""
    x = w.to(torch.bfloat16).float()
    rows, cols = x.shape
    tiles_r, tiles_c = blocks(rows), blocks(cols)
    # Zeros never raise a maximum of magnitudes, so padding does not enter amax.
    padded = pad(x, (0, tiles_c * BLOCK - cols, 0, tiles_r * BLOCK - rows))
    amax = padded.abs().view(tiles_r, BLOCK, tiles_c, BLOCK).amax(dim=(1, 3))
    scale = scale_from_amax(amax, policy)
    return quantize_with_scale(x, _expand(scale, rows, cols)), scale


def dequant_weight(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`code * scale` in FP32, rounded to `dtype`."""
    return (codes.float() * _expand(scale, *codes.shape)).to(dtype)
