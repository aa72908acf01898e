"""GEMMs on block-scaled E4M3 operands: FProp, DGrad, WGrad.

All accumulate in FP32 over 128-blocks of the contracted dimension, in order:
`acc = acc + block_product * (scale_a * scale_b)`, where the product of a block is exact before it is rounded to FP32
(in the reference; tensor cores keep fewer bits, see docs/kernels.md). T tokens, N out features, K in features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_kernels.formats import blocks, scale_shape
from jetrl_kernels.gemm_fp8 import reference

__all__ = ["gemm_dgrad", "gemm_fprop", "gemm_wgrad", "wgrad_bf16"]


def _check(name: str, codes: Tensor, scale: Tensor, want: tuple[int, int]) -> None:
    if codes.dim() != 2 or codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name} codes must be 2-D float8_e4m3fn, not {codes.dtype} {tuple(codes.shape)}")
    if tuple(scale.shape) != want:
        raise ValueError(f"{name} codes {tuple(codes.shape)} need a scale of shape {want}, not {tuple(scale.shape)}")


def _check_equal(what: str, a: int, b: int) -> None:
    if a != b:
        raise ValueError(f"{what} differ: {a} and {b}")


def gemm_fprop(
    x_codes: Tensor,
    x_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    initial: Tensor | None = None,
) -> Tensor:
    """Y = X W^T. A row's result does not depend on the other rows (the kernel is chosen by (N, K) alone).

    Args:
        x_codes: E4M3 [T, K]; x_scale: FP32 [T, ceil(K/128)].
        w_codes: E4M3 [N, K]; w_scale: FP32 [ceil(N/128), ceil(K/128)].
        out_dtype: BF16, or FP32 for the accumulators unrounded.
        initial: FP32 [T, N], the accumulators to go on from (CPU only): the K-blocks before these were another rank's.

    Returns:
        [T, N] of `out_dtype`.

    Raises:
        ValueError: shapes that do not fit, or `initial` on a GPU.
    """
    _check("x", x_codes, x_scale, (x_codes.shape[0], blocks(x_codes.shape[1])))
    _check("w", w_codes, w_scale, scale_shape(*w_codes.shape))
    _check_equal("in features of x and w", x_codes.shape[1], w_codes.shape[1])
    if initial is not None and x_codes.is_cuda:
        raise ValueError("gemm_fprop: a GPU kernel cannot go on from given accumulators")
    if x_codes.is_cuda:
        from jetrl_kernels.gemm_fp8 import dispatch

        return dispatch.fprop(x_codes, x_scale, w_codes, w_scale, out_dtype)
    return reference.gemm_fprop(x_codes, x_scale, w_codes, w_scale, initial).to(out_dtype)


def gemm_dgrad(
    dy_codes: Tensor,
    dy_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    *,
    w_codes_t: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """dX = dY W, with the very bytes of the forward weight (a square tile has one scale either way).

    Args:
        dy_codes: E4M3 [T, N]; dy_scale: FP32 [T, ceil(N/128)].
        w_codes: E4M3 [N, K]; w_scale: FP32 [ceil(N/128), ceil(K/128)].
        w_codes_t: the same codes as [K, N], if the caller keeps them: saves a transposition on a GPU.

    Returns:
        [T, K] of `out_dtype`.
    """
    _check("dy", dy_codes, dy_scale, (dy_codes.shape[0], blocks(dy_codes.shape[1])))
    _check("w", w_codes, w_scale, scale_shape(*w_codes.shape))
    _check_equal("out features of dy and w", dy_codes.shape[1], w_codes.shape[0])
    codes_t = w_codes.t() if w_codes_t is None else w_codes_t
    if dy_codes.is_cuda:
        from jetrl_kernels.gemm_fp8 import dispatch

        return dispatch.dgrad(dy_codes, dy_scale, codes_t.contiguous(), w_scale.t(), out_dtype)
    return reference.gemm_fprop(dy_codes, dy_scale, codes_t, w_scale.t()).to(out_dtype)


def gemm_wgrad(
    dy_cols: tuple[Tensor, Tensor], x_cols: tuple[Tensor, Tensor], *, out: Tensor, accumulate: bool = True
) -> Tensor:
    """dW (+)= dY^T X, summed over tokens in blocks of 128, into FP32.

    Args:
        dy_cols: E4M3 [N, T] and FP32 [ceil(T/128), N], from `quant_act_cols`.
        x_cols: E4M3 [K, T] and FP32 [ceil(T/128), K].
        out: FP32 [N, K], written in place (added to, if `accumulate`: first the sum over tokens, then one addition).

    Returns:
        `out`.
    """
    (dy_codes, dy_scale), (x_codes, x_scale) = dy_cols, x_cols
    _check("dy", dy_codes, dy_scale, (blocks(dy_codes.shape[1]), dy_codes.shape[0]))
    _check("x", x_codes, x_scale, (blocks(x_codes.shape[1]), x_codes.shape[0]))
    _check_equal("tokens of dy and x", dy_codes.shape[1], x_codes.shape[1])
    if out.dtype != torch.float32 or tuple(out.shape) != (dy_codes.shape[0], x_codes.shape[0]):
        raise ValueError(
            f"wgrad of {dy_codes.shape[0]} x {x_codes.shape[0]} goes into FP32 of that shape, "
            f"not {out.dtype} {tuple(out.shape)}"
        )
    if dy_codes.is_cuda:
        from jetrl_kernels.gemm_fp8 import dispatch

        return dispatch.wgrad(dy_codes, dy_scale, x_codes, x_scale, out, accumulate)
    dw = reference.gemm_wgrad(dy_codes, dy_scale, x_codes, x_scale)
    return out.add_(dw) if accumulate else out.copy_(dw)


def wgrad_bf16(dy: Tensor, x: Tensor, *, out: Tensor, accumulate: bool = True) -> Tensor:
    """dW (+)= dY^T X from BF16 dY [T, N] and X [T, K] into `out` FP32 [N, K], summed in FP32: WGrad's BF16 switch."""
    if dy.is_cuda:
        if accumulate:
            return torch.addmm(out, dy.t(), x, out_dtype=torch.float32, out=out)
        return torch.mm(dy.t(), x, out_dtype=torch.float32, out=out)
    dw = dy.float().t() @ x.float()
    return out.add_(dw) if accumulate else out.copy_(dw)
