"""What all Triton kernels share: scales, E4M3 codes and BF16 rounding inside a kernel, and launch helpers.

The functions mirror `scales.py` bit for bit. Under Triton's interpreter (TRITON_INTERPRET=1, kernels on a CPU) the
casts to E4M3 and BF16 truncate; there the value is first rounded onto the target's grid, which makes the cast exact.
"""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels.formats import BLOCK, E4M3_MAX, blocks

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
GROUP = tl.constexpr(BLOCK)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_FLOOR_BITS = tl.constexpr((9 << 23) | 0x600000)  # FP32 bits of AMAX_FLOOR = 1.75 * 2**(9 - 127)


@triton.jit
def magnitude_bits(x):
    """int32 magnitude bits of BF16 `x`: ordered like |x|, with NaN above Inf above every finite number."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def block_scale(amax_bits, POW2: tl.constexpr):
    """(scale, multiplier) FP32 of blocks from their largest `magnitude_bits`.

    multiplier is 1 / scale under `pow2` (exact); scale itself under `fp32`, to divide by. Scale is NaN where the block
    holds NaN or Inf; the multiplier is finite everywhere.
    """
    bits = tl.maximum(amax_bits << 16, _FLOOR_BITS)
    if POW2:
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        multiplier = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, _E4M3_MAX, tl.float32))
        multiplier = scale
    return tl.where(amax_bits < 0x7F80, scale, float("nan")), multiplier


@triton.jit
def quantize(x, multiplier, finite, POW2: tl.constexpr):
    """E4M3 codes of FP32 `x`; `multiplier` of `block_scale` and `finite` broadcast to it. 0 where not finite."""
    if POW2:
        scaled = x * multiplier
    else:
        scaled = tl.div_rn(x, multiplier)
        scaled = tl.minimum(tl.maximum(scaled, -_E4M3_MAX), _E4M3_MAX)
    return to_e4m3(tl.where(finite, scaled, 0.0))


@triton.jit
def to_e4m3(x):
    """E4M3 nearest even of FP32 `x`, |x| <= 448."""
    if INTERPRETED:
        exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127, -6)
        ulp = ((exponent - 3 + 127) << 23).to(tl.float32, bitcast=True)
        magic = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, half to even
        rounded = ((tl.abs(x) / ulp + magic) - magic) * ulp
        sign = x.to(tl.int32, bitcast=True) & -2147483648
        x = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def to_bf16(x):
    """BF16 nearest even of FP32 `x`."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return bf16_from_bits(tl.where(nan, 0x7FC0, rounded))
    return x.to(tl.bfloat16)


@triton.jit
def bf16_from_bits(bits):
    """BF16 of the low 16 bits of int32 `bits`."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def reciprocal(x):
    """1 / x of FP32 within 1 ulp, in one instruction."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def to_f32(x):
    """FP32 of BF16 `x`, by bits (the interpreter's cast is wrong for subnormals)."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def quantize_groups(y, AXIS: tl.constexpr, POW2: tl.constexpr):
    """E4M3 codes of BF16 `y` [A, B], and the FP32 scale of each group, a line along AXIS."""
    amax = tl.max(magnitude_bits(y), axis=AXIS)
    scale, multiplier = block_scale(amax, POW2)
    finite = tl.expand_dims(amax < 0x7F80, AXIS)
    return quantize(to_f32(y), tl.expand_dims(multiplier, AXIS), finite, POW2), scale


@triton.jit
def emit_tile(
    y,
    r,
    c,
    token_group,
    group,
    rows,
    cols,
    out,
    POW2: tl.constexpr,
    FORMS: tl.constexpr,
):
    """Store a BF16 tile `y` [R, 128] at rows `r`, columns `c` (those of `group`) of a [rows, cols] output.

    out: `TileOutput.args()`. FORMS, three booleans: as it is; quantized along rows; quantized along columns and stored
    transposed (R is 128 then, the rows of `token_group`).
    """
    bf16_ptr, codes_ptr, scale_ptr, scale_stride, codes_t_ptr, scale_t_ptr, t_stride = out
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    r64 = r.to(tl.int64)
    offsets = r64[:, None] * cols + c[None, :]
    if FORMS[0]:
        tl.store(bf16_ptr + offsets, y, mask=mask)
    if FORMS[1]:
        codes, scale = quantize_groups(y, 1, POW2)
        tl.store(codes_ptr + offsets, codes, mask=mask)
        tl.store(scale_ptr + group.to(tl.int64) * scale_stride + r, scale, mask=r < rows)
    if FORMS[2]:
        codes, scale = quantize_groups(y, 0, POW2)
        mask_t = (c < cols)[:, None] & (r >= 0)[None, :]  # the padding tokens of the last group get code 0
        tl.store(codes_t_ptr + c.to(tl.int64)[:, None] * t_stride + r[None, :], tl.trans(codes), mask=mask_t)
        tl.store(scale_t_ptr + token_group.to(tl.int64) * cols + c, scale, mask=c < cols)


@triton.jit
def splitmix64(position, SEED: tl.constexpr):
    """Odd uint64 keys of int64 positions, as `digest.reference.keys`."""
    x = (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15 + SEED
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)) | 1


class TileOutput:
    """Output buffers of a kernel that ends in `emit_tile`, and the arguments that name them.

    bf16: [rows, cols]. row: codes E4M3 [rows, cols] and FP32 [rows, groups] with stride 1 along rows, columns padded to
    4 rows (16 bytes, as the GEMMs want it). col: codes E4M3 [cols, rows], memory rows padded with zeros to whole groups
    of 128 tokens (so that a GEMM may read whole blocks), and FP32 [token groups, cols].
    """

    def __init__(self, rows: int, cols: int, device: torch.device, *, bf16: bool, row: bool, col: bool):
        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        e4m3, fp32 = torch.float8_e4m3fn, torch.float32
        self.forms = (bf16, row, col)
        self.bf16 = empty(rows, cols, dtype=torch.bfloat16) if bf16 else None
        self.row = self.col = None
        if row:
            scale = empty(blocks(cols), -(-rows // 4) * 4, dtype=fp32)
            scale = scale.t() if rows % 4 == 0 else scale[:, :rows].t()
            self.row = (empty(rows, cols, dtype=e4m3), scale)
        if col:
            codes_t = empty(cols, blocks(rows) * BLOCK, dtype=e4m3)
            codes_t = codes_t if rows % BLOCK == 0 else codes_t[:, :rows]
            self.col = (codes_t, empty(blocks(rows), cols, dtype=fp32))

    def args(self) -> tuple[Any, ...]:
        """`out` of `emit_tile`: pointers and strides, in which any pointer stands for none."""
        present = [t for t in (self.bf16, *(self.row or ()), *(self.col or ())) if t is not None]
        nothing = (present[0], present[0])
        (codes, scale), (codes_t, scale_t) = self.row or nothing, self.col or nothing
        bf16 = present[0] if self.bf16 is None else self.bf16
        return bf16, codes, scale, scale.stride(1), codes_t, scale_t, codes_t.stride(0)


def unit_columns(x: Tensor) -> Tensor:
    """`x`, copied only if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
