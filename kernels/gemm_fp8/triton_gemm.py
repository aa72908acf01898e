"""The portable GEMM in Triton: any shape, any strides, dense or grouped by expert.

One tile size whatever the number of rows, so that a row's result does not depend on the others. It is the fallback
where no library takes a shape; DeepGEMM and cuBLASLt are faster on large ones.
"""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels.triton_lib import GROUP, INTERPRETED, to_bf16

BLOCK_M, BLOCK_N, WARPS, STAGES = 64, 128, 4, 3


@triton.jit
def _kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    out_ptr,
    tiles_ptr,
    rows,
    cols,
    inner,
    a_stride,
    a_scale_stride_row,
    a_scale_stride_k,
    b_stride,
    b_scale_stride_row,
    b_scale_stride_k,
    b_stride_expert,
    b_scale_stride_expert,
    out_stride,
    GROUPED: tl.constexpr,
    B_TILED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[m, n] (+)= sum over k-blocks of (a b^T)_block * a_scale[m, k] * b_scale[n (or n // 128), k]."""
    tile = tl.program_id(0)
    first, last = tile * BLOCK_M, rows
    if GROUPED:
        expert = tl.load(tiles_ptr + 3 * tile).to(tl.int64)
        first, last = tl.load(tiles_ptr + 3 * tile + 1), tl.load(tiles_ptr + 3 * tile + 2)
        b_ptr += expert * b_stride_expert
        b_scale_ptr += expert * b_scale_stride_expert
    m = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m64, n64 = m.to(tl.int64), n.to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(tl.cdiv(inner, GROUP)):
        k = block * GROUP + tl.arange(0, GROUP)
        a = tl.load(a_ptr + m64[:, None] * a_stride + k[None, :], mask=(m < last)[:, None] & (k < inner)[None, :])
        b = tl.load(b_ptr + n64[None, :] * b_stride + k[:, None], mask=(n < cols)[None, :] & (k < inner)[:, None])
        product = tl.dot(a.to(tl.float32), b.to(tl.float32)) if INTERPRETED else tl.dot(a, b)
        a_scale = tl.load(a_scale_ptr + m64 * a_scale_stride_row + block * a_scale_stride_k, mask=m < last, other=0.0)
        if B_TILED:
            tile_n = tl.program_id(1) * BLOCK_N // GROUP
            b_scale = tl.load(b_scale_ptr + tile_n * b_scale_stride_row + block * b_scale_stride_k)
            total += product * (a_scale * b_scale)[:, None]
        else:
            b_scale = tl.load(
                b_scale_ptr + n64 * b_scale_stride_row + block * b_scale_stride_k, mask=n < cols, other=0.0
            )
            total += product * (a_scale[:, None] * b_scale[None, :])
    at = out_ptr + m64[:, None] * out_stride + n[None, :]
    mask = (m < last)[:, None] & (n < cols)[None, :]
    if ACCUMULATE:
        total += tl.load(at, mask=mask, other=0.0)
    tl.store(at, to_bf16(total) if out_ptr.dtype.element_ty == tl.bfloat16 else total, mask=mask)


def gemm_nt(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, *, tiled: bool, accumulate: bool = False
) -> Tensor:
    """out [M, N] (+)= A B^T for codes A [M, K], B [N, K], contiguous along K.

    a_scale: [M, K blocks]; b_scale: [N blocks, K blocks] if `tiled` (128x128), else [N, K blocks]; any strides.
    """
    (rows, inner), cols = a.shape, b.shape[0]
    if rows and cols:
        grid = (triton.cdiv(rows, BLOCK_M), triton.cdiv(cols, BLOCK_N))
        strides = (a.stride(0), *a_scale.stride(), b.stride(0), *b_scale.stride(), 0, 0, out.stride(0))
        flags = (False, tiled, accumulate, BLOCK_M, BLOCK_N)
        _kernel[grid](
            a, a_scale, b, b_scale, out, out, rows, cols, inner, *strides, *flags, num_warps=WARPS, num_stages=STAGES
        )
    return out


def expert_tiles(offsets: Tensor, rows: int) -> Tensor:
    """int32 [tiles, 3]: expert, first and last row of each tile of BLOCK_M rows, from offsets [E + 1]; no host sync.

    There is room for the worst case; tiles that are not needed have last = 0.
    """
    experts = offsets.numel() - 1
    counts = (offsets[1:] - offsets[:-1] + BLOCK_M - 1) // BLOCK_M
    ends = counts.cumsum(0)
    tile = torch.arange(triton.cdiv(rows, BLOCK_M) + experts, device=offsets.device)
    expert = torch.searchsorted(ends, tile, right=True)
    used, expert = expert < experts, expert.clamp(max=experts - 1)
    first = offsets[expert] + (tile - (ends - counts)[expert]) * BLOCK_M
    return torch.stack([expert, first, torch.where(used, offsets[expert + 1], 0)], 1).int().contiguous()


def gemm_grouped(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, out: Tensor, *, tiled: bool = True
) -> Tensor:
    """out [T, N]: rows offsets[e] .. offsets[e + 1] are A B[e]^T, for codes A [T, K], B [E, N, K]."""
    (rows, inner), cols = a.shape, b.shape[1]
    if rows and cols:
        tiles = expert_tiles(offsets, rows)
        grid = (tiles.shape[0], triton.cdiv(cols, BLOCK_N))
        strides = (a.stride(0), *a_scale.stride(), b.stride(1), *b_scale.stride()[1:])
        strides = (*strides, b.stride(0), b_scale.stride(0), out.stride(0))
        flags = (True, tiled, False, BLOCK_M, BLOCK_N)
        _kernel[grid](
            a, a_scale, b, b_scale, out, tiles, rows, cols, inner, *strides, *flags, num_warps=WARPS, num_stages=STAGES
        )
    return out
