"""RMSNorm as vLLM computes it: FP32 statistics, BF16 rounding before the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_kernels.rms_norm import reference

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """`bf16(x * rsqrt(mean(x^2) + eps)) * weight`, rounded again; statistics in FP32.

    Args:
        x: [..., H] BF16. weight: [H], cast to BF16. eps: added to the mean square.

    Returns:
        [..., H] BF16. Differentiable in `x` and `weight`. A row's result does not depend on the other rows.

    Raises:
        TypeError: `x` is not BF16. ValueError: `weight` does not fit.
    """
    _check(x, weight)
    if x.is_cuda:
        return _GpuNorm.apply(x, None, weight, eps)[0]
    return _RmsNorm.apply(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`s = bf16(x + residual)`; returns `(rms_norm(s), s)`. The sum is rounded before it is normalized.

    Args:
        x, residual: [..., H] BF16. weight: [H].
    """
    _check(x, weight)
    if x.is_cuda:
        return _GpuNorm.apply(x, residual, weight, eps)
    total = x + residual
    return _RmsNorm.apply(total, weight, eps), total


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise TypeError(f"rms_norm takes bfloat16, not {x.dtype}")
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"rms_norm weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")


class _RmsNorm(torch.autograd.Function):
    """Gradient of the exact formula at the saved input, in FP32; the roundings count as identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = reference.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = reference.rms_norm_backward(grads[0], x, weight, rstd)
        return dx, dw.to(weight.dtype), None


class _GpuNorm(torch.autograd.Function):
    """The same with the residual's addition and its gradient's addition in the kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from jetrl_kernels.rms_norm import kernel

        flat = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(flat.shape)
        out, total, rstd = kernel.forward(flat, weight, eps, residual=added)
        assert out.bf16 is not None
        ctx.save_for_backward(total, weight, rstd)
        ctx.with_residual = residual is not None
        total = total.view(x.shape)
        if residual is None:
            total = total.detach()
            ctx.mark_non_differentiable(total)
        ctx.set_materialize_grads(False)
        return out.bf16.view(x.shape), total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from jetrl_kernels.rms_norm import kernel

        dy, d_total = grads
        total, weight, rstd = ctx.saved_tensors
        if dy is None:
            return d_total, d_total, None, None
        d_total = d_total.reshape(total.shape) if d_total is not None and ctx.with_residual else None
        dx, dw = kernel.backward(dy.reshape(total.shape), total, weight, rstd, d_total)
        dx = dx.view(dy.shape)
        return dx, dx if ctx.with_residual else None, dw.to(weight.dtype), None
