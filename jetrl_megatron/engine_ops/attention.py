"""Causal attention over packed sequences by vLLM's paged CPU kernel, with a textbook FP32 gradient.

Letters: T packed tokens, S sequences, L one sequence's tokens, N query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from jetrl_megatron.engine_ops.library import ATTENTION_BLOCK, attention_isa, load


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Write k and v into a paged cache as the engine does, then attend. Returns `[T, N, D]`."""
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    lengths = cu_seqlens.diff()
    isa = attention_isa(head_dim)
    blocks = (lengths + ATTENTION_BLOCK - 1) // ATTENTION_BLOCK
    first_block = torch.nn.functional.pad(blocks.cumsum(0), (1, 0))
    block_table = (first_block[:-1, None] + torch.arange(int(blocks.max()))).int()
    # Rows of the table are as long as the longest sequence; entries past a sequence's own blocks are never read.
    positions = torch.arange(tokens) - torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
    slots = torch.repeat_interleave(first_block[:-1] * ATTENTION_BLOCK, lengths) + positions
    # Zeros, not empty: the engine clears its blocks too, and a stale NaN in the unused tail of a block would spread.
    cache = torch.zeros(int(first_block[-1]), kv_heads, 2 * ATTENTION_BLOCK, head_dim, dtype=q.dtype)
    k_cache, v_cache = cache.chunk(2, dim=2)
    torch.ops._C.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa, 1.0, 1.0, "auto")
    starts, lengths = cu_seqlens.int(), lengths.int()
    schedule = torch.ops._C.get_scheduler_metadata(
        len(lengths), heads, kv_heads, head_dim, lengths, q.dtype, starts, True, -1, isa, False, None
    )
    out = torch.empty_like(q)
    torch.ops._C.cpu_attention_with_kv_cache(
        q, k_cache, v_cache, out, starts, lengths, scale, True, None, -1, block_table, 0.0, schedule, None, None,
        1.0, 1.0, "auto",
    )  # fmt: skip
    return out


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one sequence in FP32, probabilities recomputed. q and grad `[L, N, D]`, k and v `[L, G, D]`.

    With P = softmax(S), S = scale * Q K^T (causal) and O = P V:
    dV = P^T dO,  dS = P * (dO V^T - rowsum(dO V^T * P)),  dQ = scale * dS K,  dK = scale * dS^T Q.
    """
    length, heads, head_dim = q.shape
    groups = k.shape[1]

    def by_group(x: Tensor) -> Tensor:  # [L, N, D] -> [G, N/G * L, D]: the query heads of a group share its keys
        return x.float().view(length, groups, -1, head_dim).permute(1, 2, 0, 3).reshape(groups, -1, head_dim)

    def by_token(x: Tensor) -> Tensor:
        return x.view(groups, -1, length, head_dim).permute(2, 0, 1, 3).reshape(length, heads, head_dim)

    q_g, grad_g, k_g, v_g = by_group(q), by_group(grad), by_group(k), by_group(v)
    future = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(heads // groups, 1)
    probs = (scale * q_g @ k_g.mT).masked_fill(future, float("-inf")).softmax(-1)
    d_probs = grad_g @ v_g.mT
    d_scores = probs * (d_probs - (d_probs * probs).sum(-1, keepdim=True))
    d_k, d_v = scale * d_scores.mT @ q_g, probs.mT @ grad_g
    return by_token(scale * d_scores @ k_g), d_k.transpose(0, 1), d_v.transpose(0, 1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, cu_seqlens)
        ctx.scale = scale
        return _forward(q, k, v, cu_seqlens, scale).flatten(1)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        q, k, v, cu_seqlens = ctx.saved_tensors
        grad = grads[0].view(q.shape)
        out = tuple(torch.empty_like(x) for x in (q, k, v))
        bounds = cu_seqlens.tolist()
        for start, end in itertools.pairwise(bounds):
            part = _backward(*(x[start:end] for x in (grad, q, k, v)), scale=ctx.scale)
            for whole, piece in zip(out, part):
                whole[start:end] = piece
        return *out, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal grouped-query attention within each packed sequence, equal to the engine's to the bit.

    Args:
        q: `[T, N, D]` BF16, rotated.
        k: `[T, G, D]` BF16, rotated; N is a multiple of G.
        v: `[T, G, D]` BF16.
        cu_seqlens: `[S + 1]` integer, 0 first, T last, strictly increasing.
        scale: factor on the scores, usually `D ** -0.5`.

    Returns:
        `[T, N * D]` BF16. Gradients are computed in FP32 and rounded to BF16 once.

    Raises:
        ValueError: shapes, dtypes or sequence bounds that do not fit.
        EngineOpsError: vLLM's operations cannot be loaded.
    """
    load()
    problems = [
        f"{name}: expected BF16 [T, heads, D], not {x.dtype} {list(x.shape)}"
        for name, x in (("q", q), ("k", k), ("v", v))
        if x.dtype != torch.bfloat16 or x.ndim != 3 or x.shape[::2] != q.shape[::2]
    ]
    if k.shape != v.shape or q.shape[1] % k.shape[1]:
        problems.append(f"heads do not fit: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != q.shape[0] or bool((cu_seqlens.diff() <= 0).any()):
        problems.append(f"cu_seqlens: {cu_seqlens.tolist()} does not cut {q.shape[0]} tokens into non-empty sequences")
    if problems:
        raise ValueError("; ".join(problems))
    return _Attention.apply(q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens, scale)  # type: ignore
