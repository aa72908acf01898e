"""SwiGLU and its backward in Triton, ending in BF16 or straight in FP8 (what the BF16 result would quantize to)."""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels import tile_quant
from jetrl_kernels.formats import BLOCK, blocks
from jetrl_kernels.triton_lib import GROUP, TileOutput, emit_tile, reciprocal, to_bf16, to_f32, unit_columns

ROWS = 16
WARPS_ROW = 4
WARPS_BOTH = 8


@triton.jit
def _forward_kernel(
    x_ptr,
    x_stride,
    rows,
    cols,
    out,
    POW2: tl.constexpr,
    FORMS: tl.constexpr,
    R: tl.constexpr,
):
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    at = x_ptr + r.to(tl.int64)[:, None] * x_stride + c[None, :]
    gate = to_f32(tl.load(at, mask=mask, other=0.0))
    up = to_f32(tl.load(at + cols, mask=mask, other=0.0))
    activated = to_bf16(gate / (1.0 + tl.exp(-gate)))
    y = to_bf16(to_f32(activated) * up)
    emit_tile(y, r, c, tl.program_id(0), tl.program_id(1), rows, cols, out, POW2, FORMS)


@triton.jit
def _backward_kernel(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    rows,
    half,
    out,
    POW2: tl.constexpr,
    FORMS: tl.constexpr,
    R: tl.constexpr,
):
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    mask = (r < rows)[:, None] & (c < half)[None, :]
    r64 = r.to(tl.int64)
    dy = to_f32(tl.load(dy_ptr + r64[:, None] * dy_stride + c[None, :], mask=mask, other=0.0))
    at = x_ptr + r64[:, None] * x_stride + c[None, :]
    gate = to_f32(tl.load(at, mask=mask, other=0.0))
    up = to_f32(tl.load(at + half, mask=mask, other=0.0))
    s = reciprocal(1.0 + tl.exp(-gate))
    # Two tiles of one output of width 2 * half; the first one's columns end at `half`.
    for side in tl.static_range(2):
        slope = up * (1.0 + gate * (1.0 - s)) if side == 0 else gate
        d = to_bf16(dy * s * slope)
        emit_tile(
            d,
            r,
            c + side * half,
            tl.program_id(0),
            tl.program_id(1) + side * (half // GROUP),
            rows,
            2 * half,
            out,
            POW2,
            FORMS,
        )


def forward(gate_up: Tensor, policy: str, *, bf16: bool, row: bool, col: bool) -> TileOutput:
    """silu(gate) * up [rows, F] of [rows, 2F] in the forms asked for."""
    x = unit_columns(gate_up)
    rows, cols = x.shape[0], x.shape[1] // 2
    if col and tile_quant.accepts("swiglu", cols, x):
        return tile_quant.quantize("swiglu", x, cols, policy, row=row, bf16=bf16)
    out = TileOutput(rows, cols, x.device, bf16=bf16, row=row, col=col)
    if x.numel():
        height = BLOCK if col else ROWS
        _forward_kernel[(triton.cdiv(rows, height), blocks(cols))](
            x,
            x.stride(0),
            rows,
            cols,
            out.args(),
            policy == "pow2",
            out.forms,
            height,
            num_warps=WARPS_BOTH if col else WARPS_ROW,
        )
    return out


def backward(dy: Tensor, gate_up: Tensor, policy: str, *, bf16: bool, row: bool, col: bool) -> TileOutput:
    """d gate_up [rows, 2F] in the forms asked for. 128 must divide F (a tile must not straddle the halves)."""
    x, dy = unit_columns(gate_up), unit_columns(dy)
    rows, half = x.shape[0], x.shape[1] // 2
    if half % BLOCK:
        raise ValueError(f"the fused backward needs a multiple of {BLOCK}, not {half}")
    if col and tile_quant.accepts("swiglu_backward", 2 * half, x, dy):
        return tile_quant.quantize("swiglu_backward", x, 2 * half, policy, row=row, bf16=bf16, dy=dy)
    out = TileOutput(rows, 2 * half, x.device, bf16=bf16, row=row, col=col)
    if x.numel():
        height = BLOCK if col else ROWS
        _backward_kernel[(triton.cdiv(rows, height), blocks(half))](
            dy,
            dy.stride(0),
            x,
            x.stride(0),
            rows,
            half,
            out.args(),
            policy == "pow2",
            out.forms,
            height,
            num_warps=WARPS_BOTH if col else WARPS_ROW,
        )
    return out
