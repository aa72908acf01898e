"""The fused MLP against its layers one by one: equal to the bit, forward and gradients."""

from __future__ import annotations

import torch

from jetrl_kernels.fp8_linear import fp8_linear
from jetrl_kernels.quant_weight import quant_weight
from jetrl_kernels.swiglu import silu_mul
from jetrl_megatron.megatron.mlp import _Mlp

T, H, F = 130, 128, 256


def _weight(rows: int, cols: int, seed: int) -> torch.nn.Parameter:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * cols**-0.5
    parameter = torch.nn.Parameter(weight.bfloat16())
    parameter.main_grad = torch.zeros(rows, cols)  # type: ignore[attr-defined]
    return parameter


def test_fused_equals_layers() -> None:
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    grad = torch.randn(T, H, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for fused in (True, False):
        fc1, fc2 = _weight(2 * F, H, 3), _weight(H, F, 4)
        q1, q2 = quant_weight(fc1.detach()), quant_weight(fc2.detach())
        leaf = x.clone().requires_grad_()
        if fused:
            y = _Mlp.apply(leaf, fc1, fc2, q1, q2, "pow2")
        else:
            y = fp8_linear(silu_mul(fp8_linear(leaf, fc1, q1)), fc2, q2)
        y.backward(grad)
        assert leaf.grad is not None and fc1.main_grad.any()
        results.append((y.detach(), leaf.grad, fc1.main_grad, fc2.main_grad))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)
