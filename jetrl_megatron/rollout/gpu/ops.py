"""The engine's layers as torch custom operators: opaque to torch.compile, safe to capture into CUDA graphs.

Each takes and returns plain contiguous tensors; FP8 codes of activations never leave an operator. The fused forms
(producer and linear) give the same bits as the two operators that they replace: a producer rounds to BF16 first.
Letters: T tokens, H in features, N out features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_kernels import rms_norm as norm
from jetrl_kernels import swiglu
from jetrl_kernels.fp8_linear import fp8_linear as _fp8_linear
from jetrl_kernels.gemm_fp8 import gemm_fprop
from jetrl_kernels.qk_norm_rope import qk_norm_rope as _qk_norm_rope
from jetrl_kernels.quant_weight import QuantizedWeight


def _dtype(fp32_out: bool) -> torch.dtype:
    return torch.float32 if fp32_out else torch.bfloat16


def _like(x: Tensor, features: int, fp32_out: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], features), dtype=_dtype(fp32_out))


@torch.library.custom_op("jetrl::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, codes: Tensor, scale: Tensor, policy: str, fp32_out: bool) -> Tensor:
    """quant(x) W^T: x BF16 `[T, H]`, codes E4M3 `[N, H]`, scale FP32 -> BF16 (or FP32) `[T, N]`."""
    return _fp8_linear(x, None, QuantizedWeight(codes, scale), policy=policy, out_dtype=_dtype(fp32_out))


@fp8_linear.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, policy: str, fp32_out: bool) -> Tensor:
    return _like(x, codes.shape[0], fp32_out)


@torch.library.custom_op("jetrl::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`jetrl_kernels.rms_norm.rms_norm`: x BF16 `[..., H]`."""
    return norm.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("jetrl::add_rms_norm", mutates_args=())
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`jetrl_kernels.rms_norm.add_rms_norm`: (norm, rounded sum), both BF16 of x's shape."""
    return norm.add_rms_norm(x, residual, weight, eps)


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))  # type: ignore[return-value]


@torch.library.custom_op("jetrl::silu_mul", mutates_args=())
def silu_mul(gate_up: Tensor) -> Tensor:
    """`jetrl_kernels.swiglu.silu_mul`: BF16 `[T, 2F]` -> `[T, F]`."""
    return swiglu.silu_mul(gate_up)


@silu_mul.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@torch.library.custom_op("jetrl::silu_fp8_linear", mutates_args=())
def silu_fp8_linear(gate_up: Tensor, codes: Tensor, scale: Tensor, policy: str, fp32_out: bool) -> Tensor:
    """`fp8_linear(silu_mul(gate_up))`, the BF16 activation never written: gate_up BF16 `[T, 2H]` -> `[T, N]`."""
    if not gate_up.is_cuda:
        return fp8_linear(swiglu.silu_mul(gate_up), codes, scale, policy, fp32_out)
    from jetrl_kernels.swiglu import kernel

    row = kernel.forward(gate_up, policy, bf16=False, row=True, col=False).row
    assert row is not None
    return gemm_fprop(*row, codes, scale, out_dtype=_dtype(fp32_out))


@silu_fp8_linear.register_fake
def _(gate_up: Tensor, codes: Tensor, scale: Tensor, policy: str, fp32_out: bool) -> Tensor:
    return _like(gate_up, codes.shape[0], fp32_out)


@torch.library.custom_op("jetrl::norm_fp8_linear", mutates_args=())
def norm_fp8_linear(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, codes: Tensor, scale: Tensor, policy: str
) -> tuple[Tensor, Tensor]:
    """`fp8_linear` of the norm of `bf16(x + residual)`, and that sum (no elements without a residual)."""
    if not x.is_cuda:
        if residual is None:
            normed, total = norm.rms_norm(x, weight, eps), x.new_empty(0)
        else:
            normed, total = norm.add_rms_norm(x, residual, weight, eps)
        return fp8_linear(normed, codes, scale, policy, False), total
    from jetrl_kernels.rms_norm import kernel

    out, total, _ = kernel.forward(x, weight, eps, policy, residual=residual, bf16=False, row=True)
    assert out.row is not None
    # An operator may not hand out its input; nobody reads the sum where nothing was added.
    return gemm_fprop(*out.row, codes, scale), total if residual is not None else x.new_empty(0)


@norm_fp8_linear.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, codes: Tensor, scale: Tensor, policy: str
) -> tuple[Tensor, Tensor]:
    total = x.new_empty(0) if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _like(x, codes.shape[0], False), total


@torch.library.custom_op("jetrl::rope", mutates_args=())
def rope(positions: Tensor, q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's rotary embedding out of place: q, k BF16 `[T, heads * D]`, table `[P, D]`."""
    q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    torch.ops._C.rotary_embedding(positions, q, k, table.shape[-1], table, True)
    return q, k


@rope.register_fake
def _(positions: Tensor, q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))  # type: ignore[return-value]


@torch.library.custom_op("jetrl::qk_norm_rope", mutates_args=())
def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`rope` of the head-wise `rms_norm` of the queries and keys in qkv `[T, (heads + 2 kv_heads) * D]`."""
    return _qk_norm_rope(qkv, positions, table, heads, kv_heads, q_weight, k_weight, eps)


@qk_norm_rope.register_fake
def _(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    dim = table.shape[-1]
    return tuple(qkv.new_empty((qkv.shape[0], n * dim)) for n in (heads, kv_heads))  # type: ignore[return-value]
