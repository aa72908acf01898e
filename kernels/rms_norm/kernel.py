"""RMSNorm in Triton: with a residual, into FP8, and backward.

Forward: one program for each row, whose sum has one order for a given H: a row's result does not depend on the others.
The column-wise FP8 form needs 128 tokens at once; it re-reads `x` in tiles, with the reciprocal RMS of the first pass.
"""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels import tile_quant
from jetrl_kernels.formats import BLOCK, blocks
from jetrl_kernels.triton_lib import (
    GROUP,
    TileOutput,
    block_scale,
    emit_tile,
    magnitude_bits,
    quantize,
    to_bf16,
    to_f32,
    unit_columns,
)

WARPS_TILE = 8


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
    mean = (tl.sum(eights.to(tl.float64), axis=0) / cols).to(tl.float32)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd_ptr + row, rstd)
    if BF16 or ROW:
        weight = to_f32(tl.load(weight_ptr + c, mask=mask, other=0.0))
        y = to_bf16(to_f32(to_bf16(value * rstd)) * weight)
        if BF16:
            tl.store(y_ptr + row * cols + c, y, mask=mask)
        if ROW:
            groups = tl.reshape(y, (WIDTH // GROUP, GROUP))
            amax = tl.max(magnitude_bits(groups), axis=1)
            scale, multiplier = block_scale(amax, POW2)
            codes = quantize(to_f32(groups), multiplier[:, None], (amax < 0x7F80)[:, None], POW2)
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
    bf16_ptr,
    codes_ptr,
    scale_ptr,
    scale_stride,
    codes_t_ptr,
    scale_t_ptr,
    t_stride,
    POW2: tl.constexpr,
    BF16: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
):
    r = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    c = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * cols + c[None, :], mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
    weight = to_f32(tl.load(weight_ptr + c, mask=c < cols, other=0.0))
    y = to_bf16(to_f32(to_bf16(to_f32(x) * rstd[:, None])) * weight[None, :])
    emit_tile(
        y,
        r,
        c,
        tl.program_id(0),
        tl.program_id(1),
        rows,
        cols,
        bf16_ptr,
        codes_ptr,
        scale_ptr,
        scale_stride,
        codes_t_ptr,
        scale_t_ptr,
        t_stride,
        POW2,
        BF16,
        ROW,
        COL,
    )


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
    x = x.contiguous()
    rows, cols = x.shape
    weight = weight.detach().to(torch.bfloat16).contiguous()
    total = torch.empty_like(x) if residual is not None else x
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    # With `col` the first pass only adds the residual and finds rstd; the outputs come from the tiles.
    row_out = None if col else TileOutput(rows, cols, x.device, bf16=bf16, row=row, col=False)
    if x.numel():
        width = max(BLOCK, triton.next_power_of_2(cols))
        _row_kernel[(rows,)](
            x,
            x if residual is None else residual.contiguous(),
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
    if tile_quant.accepts("norm", cols, total):
        out = tile_quant.quantize("norm", total, cols, policy, row=row, bf16=bf16, weight=weight, rstd=rstd)
        return out, total, rstd
    out = TileOutput(rows, cols, x.device, bf16=bf16, row=row, col=True)
    if x.numel():
        _tile_kernel[(triton.cdiv(rows, BLOCK), blocks(cols))](
            total, weight, rstd, rows, cols, *out.args(), policy == "pow2", *out.flags, num_warps=WARPS_TILE
        )
    return out, total, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, d_total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dX BF16 [rows, H] (rounded, then plus `d_total`, rounded) and dW FP32 [H] of the norm of `x`."""
    rows, cols = x.shape
    x, dy = x.contiguous(), unit_columns(dy).contiguous()
    dx = torch.empty_like(x)
    # A fixed number of programs, so that the order of dW's sum does not depend on the machine.
    programs = min(rows, 512)
    partial = torch.zeros((max(programs, 1), cols), dtype=torch.float32, device=x.device)
    if x.numel():
        width = max(BLOCK, triton.next_power_of_2(cols))
        _backward_kernel[(programs,)](
            dy,
            dy if d_total is None else d_total.contiguous(),
            x,
            weight.detach().to(torch.bfloat16).contiguous(),
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
