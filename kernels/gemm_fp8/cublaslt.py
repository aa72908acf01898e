"""cuBLASLt's block-scaled GEMMs, through Transformer Engine (which accumulates into FP32) or through torch."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@functools.cache
def transformer_engine() -> ModuleType | None:
    """transformer_engine.pytorch, or None where it is not installed."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        import transformer_engine.pytorch as te
    except ImportError:
        return None
    return te


def _pad4(scale: Tensor) -> Tensor:
    """Last dimension padded to a multiple of 4 and contiguous, as TE keeps its scales."""
    missing = -scale.shape[-1] % 4
    return pad(scale, (0, missing)) if missing else scale.contiguous()


def _row_scale(scale: Tensor) -> Tensor:
    """[M, K blocks] with stride 1 along M, padded to 4, as TE's [K blocks, M padded]: the same memory if it can be."""
    flat = scale.t()
    if flat.stride(1) == 1 and flat.stride(0) == -(-flat.shape[1] // 4) * 4:
        return flat.as_strided((flat.shape[0], flat.stride(0)), (flat.stride(0), 1))
    return _pad4(flat)


def _tensor(codes: Tensor, scale: Tensor, *, columnwise: bool, tiled: bool) -> Any:
    """TE's view of codes and scale; `columnwise` codes are [channels, tokens]."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    data, side = codes.view(torch.uint8), "columnwise" if columnwise else "rowwise"
    fields: dict[str, Any] = {f"{s}_{what}": None for s in ("rowwise", "columnwise") for what in ("data", "scale_inv")}
    fields[f"{side}_data"], fields[f"{side}_scale_inv"] = data, scale
    return Float8BlockwiseQTensorStorage(
        **fields, fp8_dtype=tex.DType.kFloat8E4M3, quantizer=None, is_2D_scaled=tiled, fake_dtype=torch.bfloat16
    )


def accepts(a: Tensor, b: Tensor) -> bool:
    """What cuBLASLt's block-scaled kernels ask for: contiguous, K a multiple of 128, M and N of 16."""
    return all(t.is_contiguous() and t.shape[1] % 128 == 0 and t.shape[0] % 16 == 0 and t.shape[0] for t in (a, b))


def gemm_nt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> Tensor:
    """out [M, N] = A B^T with 1x128 scales of A [M, K] and 128x128 scales of B [N, K], through TE."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(
        _tensor(b, _pad4(b_scale), columnwise=False, tiled=True),
        _tensor(a, _row_scale(a_scale), columnwise=False, tiled=False),
        out_dtype=out.dtype,
        layout="TN",
        out=out,
        use_split_accumulator=True,
    )
    return out


def wgrad_nt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    """out [M, N] FP32 (+)= A B^T, A [M, T] and B [N, T] column-wise codes, scales [T blocks, M] and [T blocks, N]."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(
        _tensor(b, _pad4(b_scale), columnwise=True, tiled=False),
        _tensor(a, _pad4(a_scale), columnwise=True, tiled=False),
        out_dtype=torch.float32,
        layout="NT",
        out=out,
        accumulate=accumulate,
        use_split_accumulator=True,
        grad=True,
    )
    return out


def scaled_mm_nt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] = A B^T through `torch.nn.functional.scaled_mm`, 1x128 scales of A and 128x128 scales of B."""
    from torch.nn.functional import ScalingType, scaled_mm

    return scaled_mm(
        a,
        b.t(),
        a_scale if a_scale.stride() == (1, a.shape[0]) else a_scale.t().contiguous().t(),
        ScalingType.BlockWise1x128,
        _pad4(b_scale).t(),
        ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
