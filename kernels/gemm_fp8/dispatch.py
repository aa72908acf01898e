"""Which GEMM runs on a GPU. FProp is chosen by (N, K) alone; DGrad and WGrad by what was measured to be fastest.

Backends: `deepgemm` (batch-invariant: one accumulation order whatever M), `cublaslt` (through Transformer Engine; picks
kernels by M, so never for FProp), `triton` (any shape). See RESULTS.md for the measurements behind `choices.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_kernels import fallbacks
from jetrl_kernels.formats import BLOCK, blocks
from jetrl_kernels.gemm_fp8 import choices, cublaslt, deepgemm, triton_gemm


def fprop(x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """X W^T [T, N]."""
    out = torch.empty((x_codes.shape[0], w_codes.shape[0]), dtype=out_dtype, device=x_codes.device)
    if choices.fprop(*w_codes.shape) == "deepgemm" and _deepgemm_takes("fprop", x_codes, w_codes, out):
        run = deepgemm.gemm_nt if out_dtype == torch.bfloat16 else deepgemm.gemm_nt_fp32
        return run(x_codes, x_scale, w_codes, w_scale, out)
    return triton_gemm.gemm_nt(_rows(x_codes), x_scale, _rows(w_codes), w_scale, out, tiled=True)


def dgrad(dy_codes: Tensor, dy_scale: Tensor, w_codes_t: Tensor, w_scale_t: Tensor, out_dtype: torch.dtype) -> Tensor:
    """dY W [T, K] from the transposed weight codes [K, N] and scale [K blocks, N blocks]."""
    tokens, features = dy_codes.shape[0], w_codes_t.shape[0]
    out = torch.empty((tokens, features), dtype=out_dtype, device=dy_codes.device)
    if out_dtype == torch.bfloat16:
        choice = choices.dgrad(tokens, *w_codes_t.shape)
        if choice == "cublaslt" and cublaslt.transformer_engine() and cublaslt.accepts(dy_codes, w_codes_t):
            return cublaslt.gemm_nt(dy_codes, dy_scale, w_codes_t, w_scale_t, out)
        if _deepgemm_takes("dgrad", dy_codes, w_codes_t, out):
            return deepgemm.gemm_nt(dy_codes, dy_scale, w_codes_t, w_scale_t, out)
    return triton_gemm.gemm_nt(_rows(dy_codes), dy_scale, _rows(w_codes_t), w_scale_t, out, tiled=True)


def wgrad(
    dy_codes: Tensor, dy_scale: Tensor, x_codes: Tensor, x_scale: Tensor, out: Tensor, accumulate: bool
) -> Tensor:
    """out FP32 [N, K] (+)= dY^T X from column-wise codes [N, T] and [K, T], scales [T blocks, N] and [T blocks, K]."""
    padded_dy, padded_x = _whole_blocks(dy_codes), _whole_blocks(x_codes)
    if padded_dy is not None and padded_x is not None and out.is_contiguous():
        choice = choices.wgrad(dy_codes.shape[1], dy_codes.shape[0], x_codes.shape[0])
        if choice == "cublaslt" and cublaslt.transformer_engine() and cublaslt.accepts(padded_dy, padded_x):
            return cublaslt.wgrad_nt(padded_dy, dy_scale, padded_x, x_scale, out, accumulate)
        enough = dy_codes.shape[0] >= deepgemm.FP32_ROWS
        if enough and _deepgemm_takes("wgrad", padded_dy, padded_x, out):
            start = out if accumulate else out.zero_()
            return deepgemm.wgrad_nt(padded_dy, dy_scale.t(), padded_x, x_scale.t(), start)
    return triton_gemm.gemm_nt(
        _rows(dy_codes), dy_scale.t(), _rows(x_codes), x_scale.t(), out, tiled=False, accumulate=accumulate
    )


def _deepgemm_takes(operation: str, a: Tensor, b: Tensor, out: Tensor) -> bool:
    if deepgemm.module() is None:
        return False
    if deepgemm.accepts(a, b, out):
        return True
    if a.shape[0]:
        fallbacks.note(f"gemm_{operation}", f"DeepGEMM does not take N={b.shape[0]}, K={b.shape[1]}; Triton does")
    return False


def _rows(codes: Tensor) -> Tensor:
    return codes if codes.stride(1) == 1 else codes.contiguous()


def _whole_blocks(codes: Tensor) -> Tensor | None:
    """[C, T rounded up to 128] over the same memory, if its rows are padded so (our quantizer writes zeros there)."""
    width = blocks(codes.shape[1]) * BLOCK
    if codes.stride(0) == width and codes.stride(1) == 1:
        return codes.as_strided((codes.shape[0], width), (width, 1))
    return None
