"""Grouped GEMM, exact: the dense reference, expert by expert."""

from __future__ import annotations

import itertools

from torch import Tensor

from jetrl_kernels.gemm_fp8.reference import gemm_fprop


def grouped_gemm(x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, offsets: Tensor) -> Tensor:
    """FP32 [T, N]; zero where no expert owns a row."""
    out = x_scale.new_zeros((x_codes.shape[0], w_codes.shape[1]))
    bounds = offsets.tolist()
    for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
        if last > first:
            rows = slice(first, last)
            out[rows] = gemm_fprop(x_codes[rows], x_scale[rows], w_codes[expert], w_scale[expert])
    return out
