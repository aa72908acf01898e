"""128x128 weight quantization, optionally from the FP32 master, with the BF16 copy and transposed codes.

In CUDA C++ (`tile_quant`) where the alignment allows, otherwise in Triton. One program for each tile: the
FP32 -> BF16 rounding (nearest or stochastic), the tile's maximum, the codes and their transposition happen in
registers, from one read. Same bits as the references.
"""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels import tile_quant
from jetrl_kernels.formats import scale_shape
from jetrl_kernels.master_cast.kernel import PLAIN, random_bits, round_stochastic
from jetrl_kernels.triton_lib import GROUP, block_scale, magnitude_bits, quantize, to_bf16, to_f32

WARPS, WARPS_STOCHASTIC = 8, 16


@triton.jit(do_not_specialize=PLAIN)
def _tile_kernel(
    w_ptr,
    bf16_ptr,
    codes_ptr,
    codes_t_ptr,
    scale_ptr,
    rows,
    cols,
    w_stride,
    seed,
    step,
    tensor_id,
    row0,
    col0,
    global_cols,
    POW2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    WITH_BF16: tl.constexpr,
    WITH_T: tl.constexpr,
):
    tile_r = tl.program_id(0)
    tile_c = tl.program_id(1)
    r = tile_r * GROUP + tl.arange(0, GROUP)
    c = tile_c * GROUP + tl.arange(0, GROUP)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    r64 = r.to(tl.int64)
    x = tl.load(w_ptr + r64[:, None] * w_stride + c[None, :], mask=mask, other=0.0)
    if STOCHASTIC:
        noise = random_bits(
            row0 + tile_r.to(tl.int64) * GROUP,
            col0 + tile_c.to(tl.int64) * GROUP,
            global_cols,
            seed,
            step,
            tensor_id,
            GROUP,
            GROUP,
            ALIGNED,
        )
        x = round_stochastic(x, noise)
    elif x.dtype == tl.float32:
        x = to_bf16(x)
    offsets = r64[:, None] * cols + c[None, :]
    if WITH_BF16:
        tl.store(bf16_ptr + offsets, x, mask=mask)
    amax = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
    scale, multiplier = block_scale(amax + tl.zeros((1,), tl.int32), POW2)
    codes = quantize(to_f32(x), multiplier[:, None], amax < 0x7F80, POW2)
    tl.store(codes_ptr + offsets, codes, mask=mask)
    if WITH_T:
        mask_t = (c < cols)[:, None] & (r < rows)[None, :]
        tl.store(codes_t_ptr + c.to(tl.int64)[:, None] * rows + r[None, :], tl.trans(codes), mask=mask_t)
    tl.store(scale_ptr + tile_r * tl.cdiv(cols, GROUP) + tile_c + tl.zeros((1,), tl.int32), scale)


def quantize_tiles(
    w: Tensor,
    policy: str,
    *,
    transposed: bool = False,
    bf16_out: Tensor | None = None,
    stochastic: tuple[int, int, int] | None = None,
    position: tuple[int, int, int] = (0, 0, 0),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [out, in], scale, and codes [in, out] if `transposed`, of a BF16 or FP32 weight.

    Args:
        bf16_out: contiguous BF16 [out, in] that receives the rounded weight.
        stochastic: (seed, step, tensor id) for stochastic rounding of FP32; None rounds to nearest.
        position: (row0, col0, global_cols) of the shard, for stochastic rounding.
    """
    w = w if w.stride(-1) == 1 else w.contiguous()
    rows, cols = w.shape
    even = not (transposed and rows % 16) and not (stochastic and (position[1] % 8 or position[2] % 8))
    if even and tile_quant.accepts("weight", cols, w if bf16_out is None else bf16_out, w):
        return tile_quant.quantize_weight(
            w, policy, transposed, bf16_out=bf16_out, stochastic=stochastic, position=position
        )
    codes = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=w.device)
    codes_t = torch.empty((cols, rows), dtype=torch.float8_e4m3fn, device=w.device) if transposed else None
    scale = torch.empty(scale_shape(rows, cols), dtype=torch.float32, device=w.device)
    if w.numel():
        _tile_kernel[scale_shape(rows, cols)](
            w,
            codes if bf16_out is None else bf16_out,
            codes,
            codes if codes_t is None else codes_t,
            scale,
            rows,
            cols,
            w.stride(0),
            *(stochastic or (0, 0, 0)),
            *position,
            policy == "pow2",
            stochastic is not None,
            position[1] % 8 == 0 and position[2] % 8 == 0,
            bf16_out is not None,
            transposed,
            num_warps=WARPS if stochastic is None else WARPS_STOCHASTIC,
        )
    return codes, scale, codes_t
