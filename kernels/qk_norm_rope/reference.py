"""The fused operation as its parts: the norm's own reference, and the rotation in FP32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_kernels.rms_norm import rms_norm


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """`[T, heads, D]` BF16 rotated: products of BF16 are exact in FP32, so only the sum and the result are rounded."""
    cos, sin = table[positions].float().unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(torch.bfloat16)


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
    dim = table.shape[-1]
    tokens = qkv.shape[0]
    q, k, _ = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    out = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        by_head = x.reshape(tokens, -1, dim)
        if weight is not None:
            by_head = rms_norm(by_head, weight, eps)
        out.append(rotate(by_head, positions, table).reshape(tokens, -1))
    return out[0], out[1]
