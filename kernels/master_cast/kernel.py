"""FP32 -> BF16 with counter-based noise in Triton; same bits as `reference.py`."""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels.triton_lib import bf16_from_bits, to_bf16

ROWS, COLS, WARPS = 8, 512, 4


@triton.jit
def random_bits(
    row, col, global_cols, seed, step, tensor_id, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr
):
    """int32 [ROWS, COLS] of 16 random bits for the elements from global (row, col) on.

    ALIGNED: columns of the tile and of the tensor are multiples of 8, so that one Philox block serves 8 neighbours.
    """
    r = row + tl.arange(0, ROWS)
    if ALIGNED:
        c = col + tl.arange(0, COLS // 8) * 8
        counter = (r[:, None] * global_cols + c[None, :]) >> 3
    else:
        c = col + tl.arange(0, COLS)
        index = r[:, None] * global_cols + c[None, :]
        counter = index >> 3
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    key = tl.cast(seed, tl.uint32).to(tl.uint64)
    words = zero + tl.cast(step, tl.uint32), zero + tl.cast(tensor_id, tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, low, high, words[0], words[1])
    if ALIGNED:
        # [..., a, b] of join(join(w0, w1), join(w2, w3)) is word 2 b + a: swap, then split each word in two halves.
        words = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 1, 3, 2))
        halves = tl.join(words & 0xFFFF, words >> 16)
        bits = tl.reshape(halves, (ROWS, COLS)).to(tl.int32)
    else:
        lane = (index & 7).to(tl.int32)
        word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
        bits = ((word >> ((lane & 1) * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)
    return bits


@triton.jit
def round_stochastic(x, noise):
    """BF16 of FP32 `x`: add `noise` (16 bits) under the BF16 mantissa and truncate; finite stays finite."""
    bits = x.to(tl.int32, bitcast=True)
    truncated = bits & -65536
    rounded = (bits + noise) & -65536
    rounded = tl.where((rounded & 0x7F800000) == 0x7F800000, truncated, rounded)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, bf16_from_bits(rounded >> 16), to_bf16(x))


# Numbers that change from step to step must not ask for another compilation.
PLAIN = ["seed", "step", "tensor_id", "row0", "col0"]


@triton.jit(do_not_specialize=PLAIN)
def _cast_kernel(
    x_ptr,
    out_ptr,
    rows,
    cols,
    x_stride,
    seed,
    step,
    tensor_id,
    row0,
    col0,
    global_cols,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    tile_r = tl.program_id(0).to(tl.int64) * ROWS
    tile_c = tl.program_id(1).to(tl.int64) * COLS
    r = tile_r + tl.arange(0, ROWS)
    c = tile_c + tl.arange(0, COLS)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    x = tl.load(x_ptr + r[:, None] * x_stride + c[None, :], mask=mask, other=0.0)
    if STOCHASTIC:
        noise = random_bits(row0 + tile_r, col0 + tile_c, global_cols, seed, step, tensor_id, ROWS, COLS, ALIGNED)
        y = round_stochastic(x, noise)
    else:
        y = to_bf16(x)
    tl.store(out_ptr + r[:, None] * cols + c[None, :], y, mask=mask)


def cast(master: Tensor, out: Tensor, stochastic: tuple[int, int, int] | None, position: tuple[int, int, int]) -> None:
    """BF16 of FP32 [rows, cols] into contiguous `out`. Arguments as `quant_weight.kernel.quantize_tiles`."""
    rows, cols = master.shape
    if master.numel():
        _cast_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(cols, COLS))](
            master,
            out,
            rows,
            cols,
            master.stride(0),
            *(stochastic or (0, 0, 0)),
            *position,
            stochastic is not None,
            position[1] % 8 == 0 and position[2] % 8 == 0,
            ROWS,
            COLS,
            num_warps=WARPS,
        )
