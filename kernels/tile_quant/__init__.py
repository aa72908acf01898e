"""Producer + column-wise (+ row-wise) quantization of 128x128 tiles in CUDA C++: the write path of WGrad's operands.

Triton's transposition of bytes through shared memory stops near 0.6 of copy bandwidth; `tile_quant.cu` does it in
registers and conflict-free shared memory. The kernels of `quant_act`, `quant_weight`, `rms_norm` and `swiglu` call this
where `accepts` says so and fall back to Triton otherwise.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from jetrl_kernels import cuda_lib
from jetrl_kernels.formats import BLOCK, blocks, scale_shape
from jetrl_kernels.triton_lib import TileOutput

__all__ = ["accepts", "norm", "quantize", "quantize_weight"]

MODES = {"identity": 0, "norm": 1, "swiglu": 2, "swiglu_backward": 3, "weight": 4}
MIN_BLOCKS = {"identity": 3, "norm": 3, "swiglu": 3, "swiglu_backward": 2, "weight": 3, "master": 3}
"""Blocks that must fit one multiprocessor, which bounds the registers of each: measured best."""
RUN = 4
"""Token groups in a band of blocks that run together: measured best."""
AHEAD = 2
"""Bands by which a norm's statistics run ahead of its tiles: enough that no tile waits, few enough for the L2."""
PARTS = 16
"""Blocks that share the statistics of a token group: a row for each warp."""
THREADS = 256

_PACK = struct.Struct("11P7q3I5if4xd").pack
"""`struct Arguments` of the source: pointers x, dy, weight, rstd, total, ready, bf16, codes, scale, codes_t, scale_t;
64-bit strides of x, dy, scale, codes_t, then row0, col0, global_cols; 32-bit seed, step, tensor_id, rows, cols, half,
tiles_t, tiles_c; eps; 1 / cols of a norm."""


@functools.cache
def _kernel(mode: str, policy: str, min_blocks: int, **macros: int) -> cuda_lib.Kernel:
    names = ("ROW", "COL", "BF16OUT", "SOURCE", "RESIDUAL")
    switches = {name: int(macros.get(name, 0)) for name in names} | {"POW2": int(policy == "pow2"), "MODE": MODES[mode]}
    text = cuda_lib.source("rms_norm/statistics.cu", "tile_quant/tile_quant.cu")
    numbers = {"MIN_BLOCKS": min_blocks, "RUN": RUN, "AHEAD": AHEAD, "PARTS": PARTS}
    return cuda_lib.Kernel(text, "tile_quant", switches | numbers, THREADS)


def _pointers(**tensors: Tensor | None) -> list[int]:
    """Addresses in the order of the source's structure; 0 where there is none."""
    names = ("x", "dy", "weight", "rstd", "total", "ready", "bf16", "codes", "scale", "codes_t", "scale_t")
    found = [tensors.get(name) for name in names]
    return [0 if t is None else t.data_ptr() for t in found]


def accepts(mode: str, cols: int, *inputs: Tensor) -> bool:
    """Whether the kernel can run: see `cuda_lib.takes`. `cols` is the width of the output."""
    return (mode != "swiglu_backward" or cols % (2 * BLOCK) == 0) and cuda_lib.takes(cols, *inputs)


def quantize(
    mode: str, x: Tensor, cols: int, policy: str, *, row: bool, bf16: bool = False, dy: Tensor | None = None
) -> TileOutput:
    """Column-wise codes (and row-wise, and BF16) of the [rows, cols] that `mode` makes of `x`.

    identity: x [rows, cols]. swiglu: x is [rows, 2 cols]. swiglu_backward: x is [rows, cols], dy [rows, cols / 2]. All
    BF16.
    """
    rows = x.shape[0]
    out = TileOutput(rows, cols, x.device, bf16=bf16, row=row, col=True)
    bf16_out, codes, scale, scale_stride, codes_t, scale_t, t_stride = out.args()
    half = {"swiglu": cols, "swiglu_backward": cols // 2}.get(mode, 0)
    tiles_t, tiles_c = blocks(rows), blocks(half if mode == "swiglu_backward" else cols)
    pointers = _pointers(x=x, dy=dy, bf16=bf16_out, codes=codes, scale=scale, codes_t=codes_t, scale_t=scale_t)
    strides = (x.stride(0), 0 if dy is None else dy.stride(0), scale_stride, t_stride)
    arguments = _PACK(*pointers, *strides, 0, 0, 0, 0, 0, 0, rows, cols, half, tiles_t, tiles_c, 0.0, 0.0)
    kernel = _kernel(mode, policy, MIN_BLOCKS[mode], ROW=row, COL=1, BF16OUT=bf16)
    kernel.launch(tiles_t * tiles_c, arguments, x.device)
    return out


def norm(
    x: Tensor, weight: Tensor, eps: float, policy: str, *, residual: Tensor | None, bf16: bool, row: bool
) -> tuple[TileOutput, Tensor, Tensor]:
    """RMSNorm of BF16 [rows, cols] (of x + residual) as column-wise codes (and row-wise, and BF16).

    All contiguous; `accepts("norm", cols, x, residual)` must hold. Returns what `rms_norm.kernel.forward` does.
    """
    rows, cols = x.shape
    out = TileOutput(rows, cols, x.device, bf16=bf16, row=row, col=True)
    bf16_out, codes, scale, scale_stride, codes_t, scale_t, t_stride = out.args()
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    tiles_t, tiles_c = blocks(rows), blocks(cols)
    ready = torch.zeros(tiles_t, dtype=torch.int32, device=x.device)
    inputs = _pointers(x=x, dy=residual, weight=weight, rstd=rstd, total=total, ready=ready)[:6]
    outputs = _pointers(bf16=bf16_out, codes=codes, scale=scale, codes_t=codes_t, scale_t=scale_t)[6:]
    numbers = (cols, cols, scale_stride, t_stride, 0, 0, 0, 0, 0, 0, rows, cols, 0, tiles_t, tiles_c, eps, 1 / cols)
    switches = {"ROW": row, "COL": 1, "BF16OUT": bf16, "RESIDUAL": residual is not None}
    kernel = _kernel("norm", policy, MIN_BLOCKS["norm"], **switches)
    bands = -(-tiles_t // RUN) + AHEAD
    kernel.launch(bands * RUN * (PARTS + tiles_c), _PACK(*inputs, *outputs, *numbers), x.device)
    return out, total, rstd


def quantize_weight(
    w: Tensor,
    policy: str,
    transposed: bool,
    *,
    bf16_out: Tensor | None = None,
    stochastic: tuple[int, int, int] | None = None,
    position: tuple[int, int, int] = (0, 0, 0),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `quant_weight.kernel.quantize_tiles`.

    `accepts("weight", in, w)` must hold; 16 divides `out` if `transposed`, 8 the position's columns if `stochastic`.
    """
    rows, cols = w.shape
    codes = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=w.device)
    codes_t = torch.empty((cols, rows), dtype=torch.float8_e4m3fn, device=w.device) if transposed else None
    scale = torch.empty(scale_shape(rows, cols), dtype=torch.float32, device=w.device)
    tiles_t, tiles_c = scale_shape(rows, cols)
    source = 0 if w.dtype == torch.bfloat16 else 1 if stochastic is None else 2
    key = [number & 0xFFFFFFFF for number in stochastic or (0, 0, 0)]
    pointers = _pointers(x=w, bf16=bf16_out, codes=codes, scale=scale, codes_t=codes_t)
    strides = (w.stride(0), 0, tiles_c, rows)
    arguments = _PACK(*pointers, *strides, *position, *key, rows, cols, 0, tiles_t, tiles_c, 0.0, 0.0)
    switches = {"ROW": 1, "COL": transposed, "BF16OUT": bf16_out is not None, "SOURCE": source}
    kernel = _kernel("weight", policy, MIN_BLOCKS["master" if source else "weight"], **switches)
    kernel.launch(tiles_t * tiles_c, arguments, w.device)
    return codes, scale, codes_t
