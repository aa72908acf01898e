"""FP32 master weights to BF16, nearest or stochastic, and on to FP8 tiles.

Stochastic rounding draws from Philox keyed on (seed, step, tensor id) and counted by the element's index in the
*global* tensor: the result does not depend on how the tensor is sharded, on the rank or on the device.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from jetrl_kernels.formats import check_policy
from jetrl_kernels.master_cast import reference
from jetrl_kernels.quant_weight import QuantizedWeight, quant_weight

__all__ = ["Rounding", "master_cast", "master_quant"]

Rounding = Literal["nearest", "stochastic"]


def master_cast(
    master: Tensor,
    rounding: Rounding = "nearest",
    *,
    seed: int = 0,
    step: int = 0,
    tensor_id: int = 0,
    row0: int = 0,
    col0: int = 0,
    global_cols: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """BF16 of an FP32 master weight or of a shard of it.

    `stochastic` rounds up in magnitude with probability (low 16 bits) / 2**16: unbiased. It never turns a finite number
    into Inf. NaN and Inf pass unchanged.

    Args:
        master: FP32 [rows, cols] or [n] (one row).
        seed: 32 bits, of the run. step: 32 bits, of the optimizer. tensor_id: 32 bits, of the tensor's name.
        row0, col0: position of the shard in the global tensor. global_cols: columns there (default: col0 + cols).
        out: BF16 of the same shape to write to.

    Returns:
        BF16 of `master`'s shape.

    Raises:
        TypeError: not FP32. ValueError: an unknown rounding, a bad shape, or a shard outside of `global_cols`.
    """
    _check(master, rounding)
    cols = master.shape[-1]
    width = col0 + cols if global_cols is None else global_cols
    if min(row0, col0) < 0 or col0 + cols > width:
        raise ValueError(f"a shard at ({row0}, {col0}) with {cols} columns does not lie in {width} columns")
    if master.is_cuda:
        from jetrl_kernels.master_cast import kernel

        into = out if out is not None and out.is_contiguous() else _empty(master)
        grid = master.detach().reshape(-1, cols)
        grid = grid if grid.stride(1) == 1 else grid.contiguous()
        noise = (seed, step, tensor_id) if rounding == "stochastic" else None
        kernel.cast(grid, into.view(-1, cols), noise, (row0, col0, width))
        return into if out is None or into is out else out.copy_(into)
    if rounding == "nearest":
        result = master.detach().to(torch.bfloat16)
    else:
        grid = master.detach().reshape(-1, cols)
        result = reference.stochastic(grid, (seed, step, tensor_id), row0, col0, width).view(master.shape)
    return result if out is None else out.copy_(result)


def master_quant(
    master: Tensor, policy: str = "pow2", rounding: Rounding = "nearest", *, transposed: bool = False, **position: int
) -> tuple[Tensor, QuantizedWeight]:
    """BF16 weight and its FP8 tiles from the FP32 master [out, in]: the bytes of `quant_weight(master_cast(...))`.

    `position` is passed to `master_cast` (seed, step, tensor_id, row0, col0, global_cols).
    """
    if master.is_cuda and master.dim() == 2:
        from jetrl_kernels.quant_weight import kernel

        _check(master, rounding)
        check_policy(policy)
        weight = _empty(master)
        noise = (position.get("seed", 0), position.get("step", 0), position.get("tensor_id", 0))
        col0 = position.get("col0", 0)
        where = (position.get("row0", 0), col0, position.get("global_cols") or col0 + master.shape[1])
        quantized = kernel.quantize_tiles(
            master.detach(),
            policy,
            transposed=transposed,
            bf16_out=weight,
            stochastic=noise if rounding == "stochastic" else None,
            position=where,
        )
        return weight, QuantizedWeight(*quantized)
    weight = master_cast(master, rounding, **position)
    return weight, quant_weight(weight, policy, transposed)


def _empty(master: Tensor) -> Tensor:
    return torch.empty(master.shape, dtype=torch.bfloat16, device=master.device)


def _check(master: Tensor, rounding: str) -> None:
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding {rounding!r} is not one of nearest, stochastic")
    if master.dtype != torch.float32:
        raise TypeError(f"master weights are float32, not {master.dtype}")
    if master.dim() not in (1, 2):
        raise ValueError(f"master_cast takes one or two dimensions, not {tuple(master.shape)}")
