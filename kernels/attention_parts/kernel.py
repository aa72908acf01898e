"""One program merges the parts of some heads of one token.

Trainer and engine launch it with other strides and numbers of parts, hence as other machine code. Nothing may depend on
that: multiplications and additions are not contracted (`enable_fp_fusion=False`), and the order of the sums is written
out.
"""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels.triton_lib import to_bf16, to_f32

HEADS_EACH = 4
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _kernel(
    parts_ptr,
    lse_ptr,
    lengths_ptr,
    out_ptr,
    out_lse_ptr,
    planes,
    tokens,
    heads,
    part_stride,
    token_stride,
    lse_part_stride,
    lse_head_stride,
    lse_token_stride,
    out_stride,
    part,
    OWN_LAST: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    length = tl.load(lengths_ptr + token)
    mask = (head < heads) & (length > 0)
    count = (length + part - 1) // part
    d = tl.arange(0, DIM)
    lse_at = lse_ptr + head * lse_head_stride + token * lse_token_stride
    x_at = parts_ptr + token * token_stride + head[:, None] * DIM + d[None, :]

    first = planes * 0
    if OWN_LAST:
        first = tl.where(count == 1, planes - 1, 0)
    first_lse = tl.load(lse_at + first.to(tl.int64) * lse_part_stride, mask=mask, other=0.0)
    largest = first_lse
    for p in range(1, count):
        plane = p
        if OWN_LAST:
            plane = tl.where(p == count - 1, planes - 1, p)
        largest = tl.maximum(largest, tl.load(lse_at + plane.to(tl.int64) * lse_part_stride, mask=mask, other=0.0))

    x = to_f32(tl.load(x_at + first.to(tl.int64) * part_stride, mask=mask[:, None], other=0.0))
    below = tl.exp2((first_lse - largest) * LOG2_E)
    above = below[:, None] * x
    for p in range(1, count):
        plane = p
        if OWN_LAST:
            plane = tl.where(p == count - 1, planes - 1, p)
        lse = tl.load(lse_at + plane.to(tl.int64) * lse_part_stride, mask=mask, other=0.0)
        x = to_f32(tl.load(x_at + plane.to(tl.int64) * part_stride, mask=mask[:, None], other=0.0))
        w = tl.exp2((lse - largest) * LOG2_E)
        above = above + w[:, None] * x
        below = below + w

    out = to_bf16(tl.div_rn(above, tl.broadcast_to(below[:, None], (HEADS, DIM))))
    tl.store(out_ptr + token * out_stride + head[:, None] * DIM + d[None, :], out, mask=(head < heads)[:, None])
    tl.store(out_lse_ptr + head * tokens + token, largest + tl.log(below), mask=head < heads)


def merge_parts(
    parts: Tensor, lse: Tensor, lengths: Tensor, part: int, own_last: bool, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `attention_parts.merge_parts`; BF16, D a power of two of at least 16."""
    planes, tokens, heads, dim = parts.shape
    result: Tensor = parts.new_empty((tokens, heads, dim)) if out is None else out
    total = torch.empty((heads, tokens), dtype=torch.float32, device=parts.device)
    if tokens:
        _kernel[(tokens, triton.cdiv(heads, HEADS_EACH))](
            parts,
            lse,
            lengths,
            result,
            total,
            planes,
            tokens,
            heads,
            parts.stride(0),
            parts.stride(1),
            *lse.stride(),
            result.stride(0),
            part,
            OWN_LAST=own_last,
            DIM=dim,
            HEADS=HEADS_EACH,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return result, total
