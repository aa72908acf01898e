"""Producer + column-wise (+ row-wise) quantization of 128x128 tiles in CUDA C++: the write path of WGrad's operands.

Triton's transposition of bytes through shared memory stops near 0.6 of copy bandwidth; `tile_quant.cu` does it in
registers and conflict-free shared memory. The kernels of `quant_act`, `rms_norm` and `swiglu` call this where its
alignment holds and fall back to Triton otherwise.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from torch import Tensor

from jetrl_kernels import cuda_lib
from jetrl_kernels.formats import BLOCK, blocks
from jetrl_kernels.triton_lib import TileOutput

__all__ = ["accepts", "quantize"]

MODES = {"identity": 0, "norm": 1, "swiglu": 2, "swiglu_backward": 3}
MIN_BLOCKS = {"identity": 3, "norm": 3, "swiglu": 3, "swiglu_backward": 3}
"""Blocks that must fit one multiprocessor, which bounds the registers of each: measured best."""
RUN = 8
"""Token groups in a band of blocks that run together: measured best."""


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source, field by field."""

    _pointers = ("x", "dy", "weight", "rstd", "bf16", "codes", "scale", "codes_t", "scale_t")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_longlong) for name in ("x_stride", "dy_stride", "scale_stride", "t_stride")),
        *((name, ctypes.c_int) for name in ("rows", "cols", "half", "tiles_t", "tiles_c")),
    ]


@functools.cache
def _source() -> str:
    return (Path(__file__).parent / "tile_quant.cu").read_text()


@functools.cache
def _kernel(mode: str, pow2: bool, row: bool, bf16: bool, min_blocks: int, band: int) -> cuda_lib.Kernel:
    macros = {"MODE": MODES[mode], "POW2": int(pow2), "ROW": int(row), "BF16OUT": int(bf16)}
    macros |= {"MIN_BLOCKS": min_blocks, "RUN": band}
    return cuda_lib.Kernel(_source(), "tile_quant", macros, 256)


def accepts(mode: str, cols: int, *inputs: Tensor) -> bool:
    """Whether the kernel can run: CUDA inputs with 16-byte aligned rows, whole 16-byte pieces of a row."""
    side = BLOCK if mode == "swiglu_backward" else 8
    width = cols // 2 if mode == "swiglu_backward" else cols
    if width % side or not inputs[0].is_cuda or not cuda_lib.available():
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
    if not x.numel():
        return out
    pointers = out.args()
    tiles = blocks(rows), blocks(cols)
    arguments = _Arguments(
        x.data_ptr(),
        dy.data_ptr() if dy is not None else None,
        weight.data_ptr() if weight is not None else None,
        rstd.data_ptr() if rstd is not None else None,
        pointers[0].data_ptr(),
        pointers[1].data_ptr(),
        pointers[2].data_ptr(),
        pointers[4].data_ptr(),
        pointers[5].data_ptr(),
        x.stride(0),
        dy.stride(0) if dy is not None else 0,
        pointers[3],
        pointers[6],
        rows,
        cols,
        {"swiglu": cols, "swiglu_backward": cols // 2}.get(mode, 0),
        *tiles,
    )
    kernel = _kernel(mode, policy == "pow2", row, bf16, MIN_BLOCKS[mode], RUN)
    kernel.launch(tiles[0] * tiles[1], arguments, x.device)
    return out
