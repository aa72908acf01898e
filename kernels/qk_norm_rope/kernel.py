"""One program for some heads of one token; a head's row is read where the projection left it."""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels.triton_lib import to_bf16, to_f32

HEADS_EACH = 8


@triton.jit
def _normed(x, square_of, weight, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """BF16 norm of `x` as FP32; `square_of` holds the whole rows in order, `x` maybe with its halves swapped."""
    if NORM:
        # The order of the sum is the norm's own (see `rms_norm`): eights in FP32, then FP64.
        eights = tl.sum(tl.reshape(square_of * square_of, (square_of.shape[0], DIM // 8, 8)), axis=2)
        mean = (tl.sum(eights.to(tl.float64), axis=1) / DIM).to(tl.float32)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        x = to_f32(to_bf16(to_f32(to_bf16(x * rstd[:, None])) * weight))
    return x


@triton.jit
def _kernel(
    qkv_ptr,
    positions_ptr,
    table_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_ptr,
    row_stride,
    heads,
    kv_heads,
    eps,
    NORM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = (head < heads)[:, None]
    mask = (head < heads + kv_heads)[:, None]
    d = tl.arange(0, DIM)
    other = (d + DIM // 2) % DIM
    row = qkv_ptr + token * row_stride + head[:, None] * DIM
    x = to_f32(tl.load(row + d[None, :], mask=mask, other=0.0))
    partner = to_f32(tl.load(row + other[None, :], mask=mask, other=0.0))
    weight, partner_weight = x, partner
    if NORM:
        weight = to_f32(tl.where(is_q, tl.load(q_weight_ptr + d)[None, :], tl.load(k_weight_ptr + d)[None, :]))
        partner_weight = to_f32(
            tl.where(is_q, tl.load(q_weight_ptr + other)[None, :], tl.load(k_weight_ptr + other)[None, :])
        )
    y = _normed(x, x, weight, eps, DIM, NORM)
    partner = _normed(partner, x, partner_weight, eps, DIM, NORM)
    at = table_ptr + tl.load(positions_ptr + token) * DIM + d % (DIM // 2)
    cos, sin = to_f32(tl.load(at))[None, :], to_f32(tl.load(at + DIM // 2))[None, :]
    turned = tl.where((d < DIM // 2)[None, :], y * cos - partner * sin, y * cos + partner * sin)
    out = to_bf16(turned)
    tl.store(q_ptr + (token * heads + head[:, None]) * DIM + d[None, :], out, mask=is_q)
    tl.store(k_ptr + (token * kv_heads + head[:, None] - heads) * DIM + d[None, :], out, mask=mask & ~is_q)


def forward(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `qk_norm_rope`; D a power of two of at least 16."""
    tokens, dim = qkv.shape[0], table.shape[-1]
    q = qkv.new_empty((tokens, heads * dim))
    k = qkv.new_empty((tokens, kv_heads * dim))
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    weights = [table if w is None else w.detach().to(torch.bfloat16).contiguous() for w in (q_weight, k_weight)]
    if tokens:
        _kernel[(tokens, triton.cdiv(heads + kv_heads, HEADS_EACH))](
            qkv,
            positions.contiguous(),
            table.contiguous(),
            *weights,
            q,
            k,
            qkv.stride(0),
            heads,
            kv_heads,
            eps,
            q_weight is not None,
            dim,
            HEADS_EACH,
            num_warps=4,
        )
    return q, k
