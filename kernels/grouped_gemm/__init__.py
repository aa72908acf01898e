"""Grouped FP8 GEMM: the linear layers of a mixture of experts, each token times its own expert's weight."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_kernels.formats import BLOCK, blocks, scale_shape
from jetrl_kernels.grouped_gemm import reference

__all__ = ["grouped_gemm"]


def grouped_gemm(
    x_codes: Tensor,
    x_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    *,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Y[i] = X[i] W[e]^T for the rows i in offsets[e] .. offsets[e + 1]. Tokens are sorted by expert. No host sync.

    Args:
        x_codes: E4M3 [T, K]; x_scale: FP32 [T, ceil(K/128)], 1x128 groups.
        w_codes: E4M3 [E, N, K]; w_scale: FP32 [E, ceil(N/128), ceil(K/128)], 128x128 tiles of each expert.
        offsets: int64 [E + 1] on the same device, ascending, from 0 to at most T.
        aligned: the caller promises that every offset is a multiple of 128 (experts padded), which DeepGEMM needs.
        out_dtype: BF16 or FP32.

    Returns:
        [T, N]; rows past offsets[E] are zero. A row's result does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, inner = x_codes.shape
    experts, out_features, w_inner = w_codes.shape
    problems = []
    if inner != w_inner:
        problems.append(f"in features of x and w differ: {inner} and {w_inner}")
    if tuple(x_scale.shape) != (tokens, blocks(inner)):
        problems.append(f"x scale is {tuple(x_scale.shape)}, not {(tokens, blocks(inner))}")
    if tuple(w_scale.shape) != (experts, *scale_shape(out_features, w_inner)):
        problems.append(f"w scale is {tuple(w_scale.shape)}, not {(experts, *scale_shape(out_features, w_inner))}")
    if tuple(offsets.shape) != (experts + 1,):
        problems.append(f"offsets are {tuple(offsets.shape)}, not {(experts + 1,)}")
    if problems:
        raise ValueError("; ".join(problems))
    if not x_codes.is_cuda:
        return reference.grouped_gemm(x_codes, x_scale, w_codes, w_scale, offsets).to(out_dtype)
    from jetrl_kernels.gemm_fp8 import deepgemm, triton_gemm

    out = x_codes.new_zeros((tokens, out_features), dtype=out_dtype)
    fits = deepgemm.module() is not None and deepgemm.accepts(x_codes, w_codes.view(-1, inner), out)
    if aligned and fits and out_dtype == torch.bfloat16 and tokens % BLOCK == 0:
        row = torch.arange(tokens, device=offsets.device)
        expert = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
        expert = torch.where(expert < experts, expert, -1).int()
        return deepgemm.grouped_nt(x_codes, x_scale, w_codes, w_scale, expert, out)
    return triton_gemm.gemm_grouped(x_codes, x_scale, w_codes, w_scale, offsets, out)
