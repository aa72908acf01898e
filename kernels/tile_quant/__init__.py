"""Producer + column-wise (+ row-wise) quantization of 128x128 tiles in CUDA C++: the write path of WGrad's operands.

Triton's transposition of bytes through shared memory stops near 0.6 of copy bandwidth; `tile_quant.cu` does it in
registers and conflict-free shared memory. The kernels of `quant_act`, `quant_weight`, `rms_norm` and `swiglu` call this
where its alignment holds and fall back to Triton otherwise.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path

import torch
from torch import Tensor

from jetrl_kernels import cuda_lib
from jetrl_kernels.formats import BLOCK, blocks, scale_shape
from jetrl_kernels.triton_lib import TileOutput

__all__ = ["accepts", "quantize", "quantize_weight"]

MODES = {"identity": 0, "norm": 1, "swiglu": 2, "swiglu_backward": 3, "weight": 4}
MIN_BLOCKS = {"identity": 3, "norm": 3, "swiglu": 3, "swiglu_backward": 2, "weight": 3}
"""Blocks that must fit one multiprocessor, which bounds the registers of each: measured best."""
RUN = 4
"""Token groups in a band of blocks that run together: measured best."""
THREADS = 256

_PACK = struct.Struct("9P4q5i4x").pack
"""`struct Arguments` of the source: pointers x, dy, weight, rstd, bf16, codes, scale, codes_t, scale_t; 64-bit strides
of x, dy, scale, codes_t; 32-bit rows, cols, half, tiles_t, tiles_c."""


@functools.cache
def _kernel(mode: str, pow2: bool, row: bool, col: bool, bf16: bool, min_blocks: int, run: int) -> cuda_lib.Kernel:
    source = (Path(__file__).parent / "tile_quant.cu").read_text()
    macros = {"MODE": MODES[mode], "POW2": int(pow2), "ROW": int(row), "COL": int(col), "BF16OUT": int(bf16)}
    return cuda_lib.Kernel(source, "tile_quant", macros | {"MIN_BLOCKS": min_blocks, "RUN": run}, THREADS)


def accepts(mode: str, cols: int, *inputs: Tensor) -> bool:
    """Whether the kernel can run: CUDA inputs with 16-byte aligned rows, whole 16-byte pieces of a row.

    `cols` is the width of the output; a gradient of SwiGLU needs halves that 128 divides.
    """
    if not inputs[0].is_cuda or not inputs[0].numel() or not cuda_lib.available():
        return False
    if cols % (2 * BLOCK if mode == "swiglu_backward" else 8):
        return False
    return all(t.stride(-1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in inputs)


def quantize(
    mode: str,
    x: Tensor,
    cols: int,
    policy: str,
    *,
    row: bool,
    bf16: bool = False,
    dy: Tensor | None = None,
    weight: Tensor | None = None,
    rstd: Tensor | None = None,
) -> TileOutput:
    """Column-wise codes (and row-wise, and BF16) of the [rows, cols] that `mode` makes of `x`.

    identity: x [rows, cols]. norm: bf16(x * rstd) * weight, rstd FP32 [rows], weight BF16 [cols].
    swiglu: x is [rows, 2 cols]. swiglu_backward: x is [rows, cols], dy [rows, cols / 2]. All BF16.
    """
    rows = x.shape[0]
    out = TileOutput(rows, cols, x.device, bf16=bf16, row=row, col=True)
    bf16_out, codes, scale, scale_stride, codes_t, scale_t, t_stride = out.args()
    half = {"swiglu": cols, "swiglu_backward": cols // 2}.get(mode, 0)
    tiles_t, tiles_c = blocks(rows), blocks(half if mode == "swiglu_backward" else cols)
    pointers = [0 if t is None else t.data_ptr() for t in (x, dy, weight, rstd)]
    pointers += [t.data_ptr() for t in (bf16_out, codes, scale, codes_t, scale_t)]
    strides = (x.stride(0), 0 if dy is None else dy.stride(0), scale_stride, t_stride)
    arguments = _PACK(*pointers, *strides, rows, cols, half, tiles_t, tiles_c)
    kernel = _kernel(mode, policy == "pow2", row, True, bf16, MIN_BLOCKS[mode], RUN)
    kernel.launch(tiles_t * tiles_c, arguments, x.device)
    return out


def quantize_weight(w: Tensor, policy: str, transposed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [out, in], scale of 128x128 tiles, and codes [in, out] if `transposed`, of BF16 `w`.

    `accepts("weight", in, w)` must hold, and 16 must divide `out` if `transposed`.
    """
    rows, cols = w.shape
    codes = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=w.device)
    codes_t = torch.empty((cols, rows), dtype=torch.float8_e4m3fn, device=w.device) if transposed else None
    scale = torch.empty(scale_shape(rows, cols), dtype=torch.float32, device=w.device)
    pointers = (w.data_ptr(), 0, 0, 0, 0, codes.data_ptr(), scale.data_ptr())
    pointers = (*pointers, 0 if codes_t is None else codes_t.data_ptr(), 0)
    tiles_t, tiles_c = scale_shape(rows, cols)
    arguments = _PACK(*pointers, w.stride(0), 0, tiles_c, rows, rows, cols, 0, tiles_t, tiles_c)
    kernel = _kernel("weight", policy == "pow2", True, transposed, False, MIN_BLOCKS["weight"], RUN)
    kernel.launch(tiles_t * tiles_c, arguments, w.device)
    return codes, scale, codes_t
