"""SwiGLU as vLLM's `silu_and_mul`: the gate is rounded to BF16 before the product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_kernels import fallbacks
from jetrl_kernels.formats import BLOCK
from jetrl_kernels.swiglu import reference

__all__ = ["silu_mul"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """`bf16(silu(gate)) * up`, rounded to BF16; gate is the first half of the last dimension, up the second.

    Args:
        gate_up: [..., 2F] BF16.

    Returns:
        [..., F] BF16, differentiable.
    """
    if gate_up.dtype != torch.bfloat16:
        raise TypeError(f"silu_mul takes bfloat16, not {gate_up.dtype}")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul takes gate and up side by side, an even width, not {gate_up.shape[-1]}")
    return _SiluMul.apply(gate_up)


class _SiluMul(torch.autograd.Function):
    """Gradient of the exact formula at the saved input, in FP32; the roundings count as identity."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        if gate_up.is_cuda:
            from jetrl_kernels.swiglu import kernel

            flat = gate_up.reshape(-1, gate_up.shape[-1])
            y = kernel.forward(flat, "pow2", bf16=True, row=False, col=False).bf16
            assert y is not None
            return y.view(*gate_up.shape[:-1], -1)
        return reference.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        if gate_up.is_cuda and gate_up.shape[-1] % (2 * BLOCK) == 0:
            from jetrl_kernels.swiglu import kernel

            flat, dy = (t.reshape(-1, t.shape[-1]) for t in (gate_up, grads[0]))
            d = kernel.backward(dy, flat, "pow2", bf16=True, row=False, col=False).bf16
            assert d is not None
            return (d.view(gate_up.shape),)
        if gate_up.is_cuda:
            fallbacks.note("silu_mul backward", f"128 does not divide {gate_up.shape[-1] // 2}")
        return (reference.silu_mul_backward(grads[0], gate_up),)
