"""Causal attention over packed sequences: the engine's FlashAttention 3 forward, another library's backward.

The wheel of vLLM carries FlashAttention 3 without its backward. The gradient needs q, k, v, the output and the
log-sum-exp of the scores, which all define alike, so cuDNN (through Transformer Engine) takes over from there. Without
Transformer Engine torch's FlashAttention 2 does, 1.4 to 1.6 times as slow on an H200.
Letters: T packed tokens, S sequences, N query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jetrl_kernels.attention_parts import PART
from jetrl_megatron.engine_ops.flash_attention import cut_packed, flash_attention
from jetrl_megatron.megatron.gpu import library


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    """(output `[T, N, D]` BF16, natural log-sum-exp FP32 `[N, T]`), keys cut where the engine cuts them."""
    if longest > PART:
        return cut_packed(q, k, v, cu_seqlens, longest, scale)
    return flash_attention(
        q, k, v, scale, causal=True, starts=cu_seqlens, starts_k=cu_seqlens, longest=longest, longest_k=longest
    )


@functools.cache
def _cudnn_backward():
    """Gradient of q, k, v by cuDNN, or None without Transformer Engine."""
    try:
        from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_bwd
    except ImportError:
        return None
    backend = FusedAttnBackend["F16_arbitrary_seqlen"]

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
                 longest: int, scale: float) -> list[Tensor]:  # fmt: skip
        stats = lse.t().contiguous().unsqueeze(-1)
        no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)
        return fused_attn_bwd(
            longest, longest, cu_seqlens, cu_seqlens, *(x.contiguous() for x in (q, k, v)), out, grad, q.dtype,
            [stats, no_dropout], backend, cu_seqlens, cu_seqlens, attn_scale=scale, dropout=0.0,
            qkv_layout="thd_thd_thd", o_format="thd", do_format="thd", dqkv_layout="thd_thd_thd",
            attn_mask_type="padding_causal", window_size=(-1, 0),
        )[:3]  # fmt: skip

    return backward


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
        out, lse = _forward(q, k, v, cu_seqlens, longest, scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        if (cudnn := _cudnn_backward()) is not None:
            return (
                *cudnn(grads[0].contiguous(), q, k, v, out, lse, cu_seqlens, ctx.longest, ctx.scale),
                None,
                None,
                None,
            )
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q, k, v, out, lse, cu_seqlens, cu_seqlens, ctx.longest, ctx.longest, 0.0, True,
            no_dropout, torch.empty(0, device=q.device), scale=ctx.scale,
        )  # fmt: skip
        return dq, dk, dv, None, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, longest: int | None = None) -> Tensor:
    """Causal grouped-query attention within each packed sequence, equal to the engine's to the bit.

    Args:
        q: `[T, N, D]` BF16, rotated, on a Hopper GPU.
        k, v: `[T, G, D]` BF16; N is a multiple of G.
        cu_seqlens: `[S + 1]` int32 on the same device, 0 first, T last.
        scale: factor on the scores, usually `D ** -0.5`.
        longest: tokens of the longest sequence; read from `cu_seqlens` (waiting for the GPU) if not given.

    Returns:
        `[T, N * D]` BF16, differentiable.

    Raises:
        ValueError: shapes or dtypes that do not fit. GpuOpsError: vLLM's operations cannot be loaded.
    """
    library.load("_vllm_fa3_C", "fwd")
    problems = [
        f"{name}: expected BF16 [T, heads, D], not {x.dtype} {list(x.shape)}"
        for name, x in (("q", q), ("k", k), ("v", v))
        if x.dtype != torch.bfloat16 or x.ndim != 3 or x.shape[::2] != q.shape[::2]
    ]
    if k.shape != v.shape or q.shape[1] % k.shape[1]:
        problems.append(f"heads do not fit: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    if cu_seqlens.dtype != torch.int32:
        problems.append(f"cu_seqlens: expected int32, not {cu_seqlens.dtype}")
    if problems:
        raise ValueError("; ".join(problems))
    if longest is None:
        longest = int(cu_seqlens.diff().max())
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _Attention.apply(q, k, v, cu_seqlens, longest, scale).flatten(1)  # type: ignore[union-attr]
