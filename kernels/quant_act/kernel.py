"""1x128 and 128x1 quantization: one read of the input, one write of each output.

In CUDA C++ (`row_quant`, `tile_quant`) where the alignment allows, otherwise in Triton: a program
owns a tile of whole groups, [rows, 128] for the row-wise form, [128, 128] where the column-wise form is asked for too.
Same bits as `reference.py`.
"""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels import cuda_lib, row_quant, tile_quant
from jetrl_kernels.formats import BLOCK, blocks
from jetrl_kernels.triton_lib import GROUP, TileOutput, emit_tile, unit_columns

ROWS = 16
WARPS_ROW = 4
WARPS_BOTH = 8


@triton.jit
def _kernel(
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
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * x_stride + c[None, :], mask=mask, other=0.0)
    emit_tile(x, r, c, tl.program_id(0), tl.program_id(1), rows, cols, out, POW2, FORMS)


def _run(x: Tensor, policy: str, row: bool, col: bool) -> TileOutput:
    x = unit_columns(x)
    rows, cols = x.shape
    if col and tile_quant.accepts("identity", cols, x):
        return tile_quant.quantize("identity", x, cols, policy, row=row)
    if not col and cuda_lib.takes(cols, x):
        return row_quant.quantize(x, policy)
    out = TileOutput(rows, cols, x.device, bf16=False, row=row, col=col)
    if x.numel():
        height = BLOCK if col else ROWS
        _kernel[(triton.cdiv(rows, height), blocks(cols))](
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


def quant_act(x: Tensor, policy: str) -> tuple[Tensor, Tensor]:
    """As `reference.quant_act`."""
    out = _run(x, policy, True, False).row
    assert out is not None
    return out


def quant_act_cols(x: Tensor, policy: str) -> tuple[Tensor, Tensor]:
    """As `reference.quant_act_cols`."""
    out = _run(x, policy, False, True).col
    assert out is not None
    return out


def quant_act_both(x: Tensor, policy: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`quant_act` and `quant_act_cols` from one read."""
    out = _run(x, policy, True, True)
    assert out.row is not None and out.col is not None
    return out.row, out.col
