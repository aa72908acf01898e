"""The gated MLP as one autograd function: SwiGLU's result and gradient exist only as FP8 codes.

Bit for bit what the separate layers compute (SwiGLU rounds to BF16 before it is quantized), without writing the BF16
activation and its BF16 gradient and reading them back. Letters: T tokens, H hidden, F intermediate.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from jetrl_kernels.formats import BLOCK
from jetrl_kernels.fp8_linear import _weight_grad
from jetrl_kernels.gemm_fp8 import gemm_dgrad, gemm_fprop
from jetrl_kernels.quant_act import quant_act_both
from jetrl_kernels.quant_weight import QuantizedWeight
from jetrl_kernels.swiglu import reference
from jetrl_megatron.megatron.layers import Fp8Weight

Codes = tuple[Tensor, Tensor]


def _silu_mul(gate_up: Tensor, policy: str) -> tuple[Codes, Codes]:
    """Row-wise and column-wise codes of SwiGLU of `[T, 2F]`."""
    if not gate_up.is_cuda:
        return quant_act_both(reference.silu_mul(gate_up), policy)
    from jetrl_kernels.swiglu import kernel

    out = kernel.forward(gate_up, policy, bf16=False, row=True, col=True)
    assert out.row is not None and out.col is not None
    return out.row, out.col


def _silu_mul_backward(grad: Tensor, gate_up: Tensor, policy: str) -> tuple[Codes, Codes]:
    """Row-wise and column-wise codes of the gradient `[T, 2F]`."""
    if not gate_up.is_cuda:
        return quant_act_both(reference.silu_mul_backward(grad, gate_up), policy)
    from jetrl_kernels.swiglu import kernel

    out = kernel.backward(grad, gate_up, policy, bf16=False, row=True, col=True)
    assert out.row is not None and out.col is not None
    return out.row, out.col


class _Mlp(torch.autograd.Function):
    """x `[T, H]` BF16 -> `[T, H]` BF16. Saves x and SwiGLU's result in FP8 columns, and gate and up in BF16."""

    @staticmethod
    def forward(
        ctx, x: Tensor, fc1: Tensor, fc2: Tensor, q1: QuantizedWeight, q2: QuantizedWeight, policy: str
    ) -> Tensor:
        x_rows, x_cols = quant_act_both(x, policy)
        gate_up = gemm_fprop(*x_rows, q1.codes, q1.scale)
        act_rows, act_cols = _silu_mul(gate_up, policy)
        ctx.save_for_backward(*x_cols, gate_up, *act_cols)
        ctx.weights, ctx.policy = (fc1, fc2, q1, q2), policy
        return gemm_fprop(*act_rows, q2.codes, q2.scale)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x_codes, x_scale, gate_up, act_codes, act_scale = ctx.saved_tensors
        fc1, fc2, q1, q2 = ctx.weights
        rows, cols = quant_act_both(grads[0], ctx.policy)
        d_act = gemm_dgrad(*rows, q2.codes, q2.scale, w_codes_t=q2.codes_t)
        d_fc2 = _weight_grad(fc2, d_act, cols, (act_codes, act_scale))
        rows, cols = _silu_mul_backward(d_act, gate_up, ctx.policy)
        dx = gemm_dgrad(*rows, q1.codes, q1.scale, w_codes_t=q1.codes_t)
        d_fc1 = _weight_grad(fc1, dx, cols, (x_codes, x_scale))
        return dx, d_fc1, d_fc2, None, None, None


class Fp8Mlp(MLP):
    """Megatron's MLP over two `Fp8Weight` linears; what the fused function does not cover runs layer by layer."""

    def _fuses(self) -> bool:
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        return (
            isinstance(fc1, Fp8Weight)
            and isinstance(fc2, Fp8Weight)
            and fc1.tp_group.size() == 1  # type: ignore[attr-defined]
            and fc1.precision.wgrad == "fp8"
            and fc2.weight.shape[1] % BLOCK == 0
            and fc1.weight.requires_grad
            and torch.is_grad_enabled()
        )

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        """hidden_states `[T, 1, H]` BF16 -> (`[T, 1, H]`, no bias)."""
        if not self._fuses():
            return super().forward(hidden_states, *args, **kwargs)
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        assert isinstance(fc1, Fp8Weight) and isinstance(fc2, Fp8Weight)
        if fc1.qweight is None or fc2.qweight is None:
            raise RuntimeError("FP8 linear used before its weight was quantized")
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = _Mlp.apply(rows, fc1.weight, fc2.weight, fc1.qweight, fc2.qweight, fc1.precision.scales)
        return out.view(hidden_states.shape), None  # type: ignore[union-attr]
