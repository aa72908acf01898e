"""RMSNorm on a GPU: with a residual, into FP8, and backward.

A row's sum has one order for a given H: a row's result does not depend on the others. In CUDA C++ (`row_quant`;
`tile_quant` for the column-wise form, which needs 128 tokens at once; `backward.cu`) where H and the alignment allow,
otherwise in Triton: one program for each row, and for the column-wise form a second pass over tiles.
"""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels import cuda_lib, row_quant, tile_quant
from jetrl_kernels.formats import BLOCK, blocks
from jetrl_kernels.triton_lib import GROUP, TileOutput, emit_tile, quantize_groups, to_bf16, to_f32

WARPS_TILE = 8
TRITON_WIDTHS = (4096, 8192)
"""Where a row with a residual runs faster in Triton, which wastes no lane on a power of two."""
PROGRAMS = 264
"""Blocks of the backward, each with a part of dW. A fixed number, so that the order of its sum does not depend on the
machine: two for each multiprocessor of an H100 or H200."""
PIECES, STAGES = 1, 3
"""Pieces of 8 channels in a thread of the backward, while 1024 threads suffice; rows on their way and at work."""

_PACK_BACKWARD = struct.Struct("7P2i").pack
_PACK_SUM = struct.Struct("2P2i").pack
"""`struct Arguments` and `struct SumArguments` of `backward.cu`."""


@triton.jit
def _row_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    y_ptr,
    codes_ptr,
    scale_ptr,
    rstd_ptr,
    cols,
    scale_stride,
    eps,
    POW2: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BF16: tl.constexpr,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    mask = c < cols
    x = tl.load(x_ptr + row * cols + c, mask=mask, other=0.0)
    if RESIDUAL:
        x = to_bf16(to_f32(x) + to_f32(tl.load(residual_ptr + row * cols + c, mask=mask, other=0.0)))
        tl.store(total_ptr + row * cols + c, x, mask=mask)
    value = to_f32(x)
    # Eight neighbours, always in one thread, are summed in order in FP32; the sums of eight in FP64, where the order
    # that the compiler picks anew for each variant of this kernel cannot show.
    eights = tl.sum(tl.reshape(value * value, (WIDTH // 8, 8)), axis=1)
    mean = (tl.sum(eights.to(tl.float64), axis=0) * (tl.full((), 1.0, tl.float64) / cols)).to(tl.float32)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd_ptr + row, rstd)
    if BF16 or ROW:
        weight = to_f32(tl.load(weight_ptr + c, mask=mask, other=0.0))
        y = to_bf16(to_f32(to_bf16(value * rstd)) * weight)
        if BF16:
            tl.store(y_ptr + row * cols + c, y, mask=mask)
        if ROW:
            codes, scale = quantize_groups(tl.reshape(y, (WIDTH // GROUP, GROUP)), 1, POW2)
            tl.store(codes_ptr + row * cols + c, tl.reshape(codes, (WIDTH,)), mask=mask)
            g = tl.arange(0, WIDTH // GROUP)
            tl.store(scale_ptr + g.to(tl.int64) * scale_stride + row, scale, mask=g * GROUP < cols)


@triton.jit
def _tile_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    rows,
    cols,
    out,
    POW2: tl.constexpr,
    FORMS: tl.constexpr,
):
    r = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    c = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * cols + c[None, :], mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
    weight = to_f32(tl.load(weight_ptr + c, mask=c < cols, other=0.0))
    y = to_bf16(to_f32(to_bf16(to_f32(x) * rstd[:, None])) * weight[None, :])
    emit_tile(y, r, c, tl.program_id(0), tl.program_id(1), rows, cols, out, POW2, FORMS)


@triton.jit
def _backward_kernel(
    dy_ptr,
    d_total_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    cols,
    rows_each,
    RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    c = tl.arange(0, WIDTH)
    mask = c < cols
    weight = to_f32(tl.load(weight_ptr + c, mask=mask, other=0.0))
    dw = tl.zeros((WIDTH,), tl.float32)
    row = tl.program_id(0) * rows_each
    last = tl.minimum(row + rows_each, rows)
    # The next row is loaded before this one is worked on: otherwise the loop waits for memory at every row.
    at = row * tl.cast(cols, tl.int64) + c
    x_next = tl.load(x_ptr + at, mask=mask & (row < last), other=0.0)
    dy_next = tl.load(dy_ptr + at, mask=mask & (row < last), other=0.0)
    for _ in range(rows_each):
        live = mask & (row < last)
        at = row * tl.cast(cols, tl.int64) + c
        x, dy = to_f32(x_next), to_f32(dy_next)
        ahead = mask & (row + 1 < last)
        x_next = tl.load(x_ptr + at + cols, mask=ahead, other=0.0)
        dy_next = tl.load(dy_ptr + at + cols, mask=ahead, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < last, other=0.0)
        normed = x * rstd
        scaled = dy * weight
        mean = tl.sum(scaled * normed, axis=0) / cols
        dx = to_bf16(rstd * (scaled - normed * mean))
        if RESIDUAL:
            dx = to_bf16(to_f32(dx) + to_f32(tl.load(d_total_ptr + at, mask=live, other=0.0)))
        tl.store(dx_ptr + at, dx, mask=live)
        dw += dy * normed
        row += 1
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * cols + c, dw, mask=mask)


def _warps(width: int, channels_each: int) -> int:
    """Warps for a row of `width`, so that a thread has about `channels_each` / 32 channels; a function of H alone."""
    return max(1, min(16, width // channels_each))


def forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    policy: str = "pow2",
    *,
    residual: Tensor | None = None,
    bf16: bool = True,
    row: bool = False,
    col: bool = False,
) -> tuple[TileOutput, Tensor, Tensor]:
    """Norm of [rows, H] (of bf16(x + residual)) in the forms asked for; the normalized input; FP32 rstd [rows]."""
    x = cuda_lib.aligned(x)
    residual = None if residual is None else cuda_lib.aligned(residual)
    rows, cols = x.shape
    weight = cuda_lib.aligned(weight.detach().to(torch.bfloat16))
    if cuda_lib.takes(cols, x):
        if col:
            return tile_quant.norm(x, weight, eps, policy, residual=residual, bf16=bf16, row=row)
        if cols <= row_quant.MAX_WIDTH and not (residual is not None and cols in TRITON_WIDTHS):
            return row_quant.norm(x, weight, eps, policy, residual=residual, bf16=bf16, row=row)
    total = torch.empty_like(x) if residual is not None else x
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    # With `col` the first pass only adds the residual and finds rstd; the outputs come from the tiles.
    row_out = None if col else TileOutput(rows, cols, x.device, bf16=bf16, row=row, col=False)
    if x.numel():
        width = max(BLOCK, triton.next_power_of_2(cols))
        _row_kernel[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            total,
            *((x, x, rstd) if row_out is None else row_out.args()[:3]),
            rstd,
            cols,
            0 if row_out is None else row_out.args()[3],
            eps,
            policy == "pow2",
            residual is not None,
            bf16 and not col,
            row and not col,
            width,
            num_warps=_warps(width, 1024),
        )
    if row_out is not None:
        return row_out, total, rstd
    out = TileOutput(rows, cols, x.device, bf16=bf16, row=row, col=True)
    if x.numel():
        _tile_kernel[(triton.cdiv(rows, BLOCK), blocks(cols))](
            total, weight, rstd, rows, cols, out.args(), policy == "pow2", out.forms, num_warps=WARPS_TILE
        )
    return out, total, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, d_total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dX BF16 [rows, H] (rounded, then plus `d_total`, rounded) and dW FP32 [H] of the norm of `x`."""
    rows, cols = x.shape
    x, dy = cuda_lib.aligned(x), cuda_lib.aligned(dy)
    d_total = None if d_total is None else cuda_lib.aligned(d_total)
    weight = cuda_lib.aligned(weight.detach().to(torch.bfloat16))
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, torch.zeros(cols, dtype=torch.float32, device=x.device)
    programs = min(rows, PROGRAMS)
    partial = torch.empty((programs, cols), dtype=torch.float32, device=x.device)
    tensors = (dy, x, weight, rstd, d_total, dx, partial)
    if cuda_lib.takes(cols, x):
        dw = torch.empty(cols, dtype=torch.float32, device=x.device)
        pointers = [0 if t is None else t.data_ptr() for t in tensors]
        kernel, sum_parts = _backward(cols, d_total is not None)
        kernel.launch(programs, _PACK_BACKWARD(*pointers, rows, cols), x.device)
        sum_parts.launch(triton.cdiv(cols, 32), _PACK_SUM(partial.data_ptr(), dw.data_ptr(), programs, cols), x.device)
        return dx, dw
    width = max(BLOCK, triton.next_power_of_2(cols))
    _backward_kernel[(programs,)](
        dy,
        dy if d_total is None else d_total,
        x,
        weight,
        rstd,
        dx,
        partial,
        rows,
        cols,
        triton.cdiv(rows, programs),
        d_total is not None,
        width,
        num_warps=_warps(width, 512),
    )
    return dx, partial.sum(0)


@functools.cache
def _backward(cols: int, residual: bool) -> tuple[cuda_lib.Kernel, cuda_lib.Kernel]:
    """The two kernels of `backward.cu` for a width."""
    pieces = max(PIECES, -(-cols // (8 * 1024)))
    warps = -(-cols // (256 * pieces))
    exact = cols == 256 * pieces * warps
    registers = 24 + 36 * pieces
    macros = {"PIECES": pieces, "WARPS": warps, "RESIDUAL": int(residual), "EXACT": int(exact), "POW2": 1}
    macros |= {"STAGES": STAGES, "MIN_BLOCKS": max(1, 65536 // (32 * warps * registers))}
    ring = STAGES * (2 + residual) * 512 * warps * pieces
    text = cuda_lib.source("rms_norm/statistics.cu", "rms_norm/backward.cu")
    main = cuda_lib.Kernel(text, "norm_backward", macros, 32 * warps, ring)
    return main, cuda_lib.Kernel(text, "sum_parts", macros, 512)
