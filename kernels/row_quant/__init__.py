"""Row-wise quantization in CUDA C++, of an activation as it is or of its RMSNorm: one read and one write.

Triton pads a row to a power of two and unpacks every number for every step; `row_quant.cu` holds a row in the registers
of one warp or a few and works on BF16 in pairs. The kernels of `quant_act` and `rms_norm` call this where
`cuda_lib.takes` says so, and fall back to Triton otherwise.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from jetrl_kernels import cuda_lib
from jetrl_kernels.triton_lib import TileOutput

__all__ = ["MAX_WIDTH", "norm", "quantize"]

ACT_ROWS, ACT_WARPS, ACT_BLOCKS = 8, 1, 24
"""Rows of a warp, warps of a block, blocks that must fit one multiprocessor: measured best."""
NORM_CHUNKS = 5
"""Most pieces of a row in one lane, while 32 warps suffice: measured best."""
NORM_THREADS = 256
"""Threads of a block that holds several rows."""
MAX_WIDTH = 32 * 32 * 8 * NORM_CHUNKS
"""Widest row that `norm` takes."""

_PACK = struct.Struct("8P2qd2if4x").pack
"""`struct Arguments` of the source: pointers x, residual, weight, total, rstd, bf16, codes, scale; 64-bit strides of x
and scale; 1 / cols; 32-bit rows, cols; eps."""


@functools.cache
def _kernel(threads: int, **macros: int) -> cuda_lib.Kernel:
    text = cuda_lib.source("rms_norm/statistics.cu", "row_quant/row_quant.cu")
    return cuda_lib.Kernel(text, "row_quant", macros, threads)


def quantize(x: Tensor, policy: str) -> TileOutput:
    """Row-wise codes and scale of BF16 x [rows, cols]; `cuda_lib.takes(cols, x)` must hold."""
    rows, cols = x.shape
    out = TileOutput(rows, cols, x.device, bf16=False, row=True, col=False)
    _, codes, scale, scale_stride, *_ = out.args()
    warps = -(-rows // ACT_ROWS) * -(-cols // 256)
    kernel = _kernel(
        32 * ACT_WARPS,
        MODE=0,
        POW2=int(policy == "pow2"),
        CHUNKS=ACT_ROWS,
        WARPS=1,
        ROWS=ACT_WARPS,
        EXACT=int(cols % 256 == 0),
        MIN_BLOCKS=ACT_BLOCKS,
    )
    pointers = (x.data_ptr(), 0, 0, 0, 0, 0, codes.data_ptr(), scale.data_ptr())
    kernel.launch(-(-warps // ACT_WARPS), _PACK(*pointers, x.stride(0), scale_stride, 0.0, rows, cols, 0.0), x.device)
    return out


def norm_shape(cols: int) -> tuple[int, int, int, int]:
    """(pieces in a lane, warps of a row, rows of a block, blocks of a multiprocessor), by the width alone."""
    warps = next(w for w in (1, 2, 4, 8, 16, 32) if cols <= w * 256 * NORM_CHUNKS)
    chunks = -(-cols // (256 * warps))
    rows = max(1, NORM_THREADS // (32 * warps))
    registers = max(48, 16 + 8 * chunks)
    return chunks, warps, rows, max(1, 65536 // (registers * 32 * warps * rows))


def norm(
    x: Tensor, weight: Tensor, eps: float, policy: str, *, residual: Tensor | None, bf16: bool, row: bool
) -> tuple[TileOutput, Tensor, Tensor]:
    """RMSNorm of BF16 [rows, cols] (of x + residual): as BF16 and as row-wise codes; what was normed; FP32 rstd [rows].

    All contiguous, `cuda_lib.takes(cols, x, residual)` must hold, and cols <= MAX_WIDTH.
    """
    rows, cols = x.shape
    out = TileOutput(rows, cols, x.device, bf16=bf16, row=row, col=False)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    bf16_out, codes, scale, scale_stride, *_ = (x, x, x, 0) if not (bf16 or row) else out.args()
    chunks, warps, block_rows, blocks = norm_shape(cols)
    kernel = _kernel(
        32 * warps * block_rows,
        MODE=1,
        POW2=int(policy == "pow2"),
        CHUNKS=chunks,
        WARPS=warps,
        ROWS=block_rows,
        EXACT=int(cols == 256 * chunks * warps),
        MIN_BLOCKS=blocks,
        RESIDUAL=int(residual is not None),
        BF16OUT=int(bf16),
        CODES=int(row),
    )
    pointers = [0 if t is None else t.data_ptr() for t in (x, residual, weight, total, rstd, bf16_out, codes, scale)]
    arguments = _PACK(*pointers, cols, scale_stride, 1 / cols, rows, cols, eps)
    kernel.launch(-(-rows // block_rows), arguments, x.device)
    return out, total, rstd
