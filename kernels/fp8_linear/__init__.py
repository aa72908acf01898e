"""The FP8 linear layer: one autograd function for the trainer's layers and the engine's quantization config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_kernels.formats import check_policy
from jetrl_kernels.gemm_fp8 import gemm_dgrad, gemm_fprop, gemm_wgrad, wgrad_bf16
from jetrl_kernels.quant_act import quant_act, quant_act_both, quant_act_cols
from jetrl_kernels.quant_weight import QuantizedWeight

__all__ = ["WGRAD_MODES", "fp8_linear"]

WGRAD_MODES = ("fp8", "bf16")


def fp8_linear(
    x: Tensor,
    weight: Tensor | None,
    qweight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    policy: str = "pow2",
    wgrad: str = "fp8",
    out_dtype: torch.dtype | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """Y = quant(X) W^T + bias on FP8 tensor cores, with its backward.

    Args:
        x: [..., in] BF16.
        weight: the Parameter [out, in] that receives the gradient; its values are not read, only `qweight`'s bytes.
            None for inference. With a `main_grad` (FP32) the gradient is added there, `grad_added_to_main_grad` is set
            and autograd receives a dummy (uninitialized unless the parameter has a true `zero_out_wgrad`), so that
            Megatron's DDP hooks fire; otherwise autograd receives the gradient in `weight.dtype`.
        qweight: FP8 bytes of the weight.
        bias: [out], added after the rounding to BF16 (in FP32 before any rounding if `out_dtype` is FP32).
        policy: scale policy of activations and gradients.
        wgrad: `fp8` (128x1 groups; activations are kept in FP8 for the backward) or `bf16` (kept in BF16).
        out_dtype: FP32 returns the unrounded accumulators, for a row-parallel layer that all-reduces before rounding;
            None is BF16.
        initial: FP32 [..., out] accumulators to go on from (CPU only, no gradient); see `gemm_fprop`.

    Returns:
        [..., out] of BF16 or `out_dtype`.

    Raises:
        ValueError: shapes that do not fit, unknown `policy` or `wgrad`. TypeError: `x` is not BF16.
    """
    check_policy(policy)
    if wgrad not in WGRAD_MODES:
        raise ValueError(f"wgrad {wgrad!r} is not one of {', '.join(WGRAD_MODES)}")
    if x.dtype != torch.bfloat16:
        raise TypeError(f"fp8_linear takes bfloat16 activations, not {x.dtype}")
    out_features, in_features = qweight.codes.shape
    if x.shape[-1] != in_features:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight of {out_features} x {in_features}")
    if weight is not None and tuple(weight.shape) != (out_features, in_features):
        raise ValueError(
            f"weight {tuple(weight.shape)} and its FP8 bytes {(out_features, in_features)} differ in shape"
        )
    rows = x.reshape(-1, in_features)
    dtype = out_dtype or torch.bfloat16
    initial = initial.view(-1, out_features) if initial is not None else None
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        y = _Fp8Linear.apply(rows, weight, qweight, policy, wgrad, dtype, initial)
    else:
        y = gemm_fprop(*quant_act(rows, policy), qweight.codes, qweight.scale, out_dtype=dtype, initial=initial)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.view(*x.shape[:-1], out_features)


class _Fp8Linear(torch.autograd.Function):
    """x [T, in] -> y [T, out]. Saves FP8 activations (BF16 for `wgrad="bf16"`); the weight's FP8 bytes by reference."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        qweight: QuantizedWeight,
        policy: str,
        wgrad: str,
        out_dtype: torch.dtype,
        initial: Tensor | None,
    ) -> Tensor:
        needs_dw = weight is not None and weight.requires_grad
        if needs_dw and wgrad == "fp8":
            (codes, scale), saved = quant_act_both(x, policy)
        else:
            codes, scale = quant_act(x, policy)
            saved = (x,) if needs_dw else ()
        ctx.save_for_backward(*saved)
        ctx.weight, ctx.qweight, ctx.policy, ctx.needs_dw, ctx.fp8_wgrad = (
            weight,
            qweight,
            policy,
            needs_dw,
            wgrad == "fp8",
        )
        return gemm_fprop(codes, scale, qweight.codes, qweight.scale, out_dtype=out_dtype, initial=initial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        dy = dy.to(torch.bfloat16)  # an FP32 output's gradient is rounded as a BF16 output's would be
        needs_dx, fp8_wgrad = ctx.needs_input_grad[0], ctx.needs_dw and ctx.fp8_wgrad
        dy_rows = dy_cols = None
        if needs_dx and fp8_wgrad:
            dy_rows, dy_cols = quant_act_both(dy, ctx.policy)
        elif needs_dx:
            dy_rows = quant_act(dy, ctx.policy)
        elif fp8_wgrad:
            dy_cols = quant_act_cols(dy, ctx.policy)
        dx = dw = None
        if dy_rows is not None:
            q = ctx.qweight
            dx = gemm_dgrad(*dy_rows, q.codes, q.scale, w_codes_t=q.codes_t)
        if ctx.needs_dw:
            dw = _weight_grad(ctx.weight, dy, dy_cols, ctx.saved_tensors)
        return dx, dw, None, None, None, None, None


def _weight_grad(
    weight: Tensor, dy: Tensor, dy_cols: tuple[Tensor, Tensor] | None, saved: tuple[Tensor, ...]
) -> Tensor:
    """What autograd gets for `weight`; adds to `weight.main_grad` if there is one."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    into = main_grad if main_grad is not None else torch.empty(weight.shape, dtype=torch.float32, device=dy.device)
    accumulate = main_grad is not None
    if dy_cols is not None:
        x_codes, x_scale = saved
        gemm_wgrad(dy_cols, (x_codes, x_scale), out=into, accumulate=accumulate)
    else:
        (x,) = saved
        wgrad_bf16(dy, x, out=into, accumulate=accumulate)
    if main_grad is None:
        return into.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)
