"""Queries and keys from a QKV projection: norm of each head (if the model has one) and rotary embedding, in one read.

Forward only, for the engine: the trainer's separate norm and rope give the same bits, which a test on a GPU proves.
"""

from __future__ import annotations

from torch import Tensor

from jetrl_kernels import fallbacks
from jetrl_kernels.qk_norm_rope import reference

__all__ = ["qk_norm_rope"]


def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys: `rms_norm` of each head, then vLLM's rotary embedding (halves of a head paired).

    Args:
        qkv: `[T, (heads + 2 * kv_heads) * D]` BF16: queries, keys, values of a token; only the former two are read.
        positions: `[T]` int64. table: `[P, D]` BF16, D/2 cosines and D/2 sines of each position.
        q_weight, k_weight: `[D]` BF16, or both None: no norm.

    Returns:
        q `[T, heads * D]` and k `[T, kv_heads * D]`, BF16, contiguous.

    Raises:
        ValueError: shapes that do not fit, or one weight without the other.
    """
    dim = table.shape[-1]
    if qkv.shape != (positions.shape[0], (heads + 2 * kv_heads) * dim):
        raise ValueError(
            f"qk_norm_rope: qkv {tuple(qkv.shape)} is not [{positions.shape[0]}, ({heads} + 2 x {kv_heads}) x {dim}]"
        )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("qk_norm_rope: one of q_weight and k_weight is missing")
    if qkv.is_cuda:
        if dim % 16 == 0 and not dim & (dim - 1):
            from jetrl_kernels.qk_norm_rope import kernel

            return kernel.forward(qkv, positions, table, heads, kv_heads, q_weight, k_weight, eps)
        fallbacks.note("qk_norm_rope", f"heads of {dim} are no power of two from 16 on")
    return reference.qk_norm_rope(qkv, positions, table, heads, kv_heads, q_weight, k_weight, eps)
