"""What the benchmarks compare with: Transformer Engine's and vLLM's own kernels, where they are installed.

Each function returns a callable, or None without the library. Used by `bench.py` files and by the bit-equality tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]


@functools.cache
def te_torch() -> Any:
    """transformer_engine_torch (TE's compiled functions), or None."""
    try:
        import transformer_engine.pytorch  # noqa: F401  (loads the library that the extension needs)
        import transformer_engine_torch as tex
    except ImportError:
        return None
    return tex


@functools.cache
def vllm_ops() -> Any:
    """vllm._custom_ops with its CUDA kernels registered, or None."""
    try:
        from vllm import _custom_ops
    except ImportError:
        return None
    return _custom_ops if hasattr(torch.ops._C, "rms_norm") else None


def te_quantizer(*, tile: bool, row: bool, col: bool, pow2: bool = True) -> Any:
    """TE's block quantizer: 128x128 tiles or 1x128 (and 128x1) groups."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    tex = te_torch()
    return Float8BlockQuantizer(
        tex.DType.kFloat8E4M3,
        rowwise=row,
        columnwise=col,
        force_pow_2_scales=pow2,
        block_scaling_dim=2 if tile else 1,
    )


def te_quantize(x: Tensor, **kind: bool) -> Run | None:
    """TE's quantization of `x`; `kind` as `te_quantizer`."""
    tex = te_torch()
    if tex is None:
        return None
    quantizer = te_quantizer(**kind)
    return lambda: tex.quantize(x, quantizer)


def vllm_group_quant(x: Tensor, pow2: bool = True) -> Run | None:
    """vLLM's 1x128 activation quantizer, column-major scales."""
    if vllm_ops() is None:
        return None
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    options = {"column_major_scales": True, "tma_aligned_scales": True, "use_ue8m0": pow2}
    return lambda: per_token_group_quant_fp8(x, 128, dtype=torch.float8_e4m3fn, **options)


def vllm_norm_quant(x: Tensor, weight: Tensor, residual: Tensor | None) -> Run | None:
    """vLLM's fused norm + 1x128 quantizer (plain amax/448 scales; it has no power-of-two option)."""
    ops = vllm_ops()
    if ops is None:
        return None
    return lambda: ops.rms_norm_per_block_quant(x, weight, 1e-6, torch.float8_e4m3fn, [1, 128], None, residual, True, 4)


def te_norm_quant(x: Tensor, weight: Tensor, *, row: bool, col: bool) -> Run | None:
    """TE's norm with a block quantizer as output."""
    tex = te_torch()
    if tex is None:
        return None
    quantizer = te_quantizer(tile=False, row=row, col=col)
    return lambda: tex.rmsnorm_fwd(x, weight, 1e-6, None, quantizer, tex.DType.kBFloat16, 0, False)


def te_swiglu_quant(gate_up: Tensor, *, row: bool, col: bool) -> Run | None:
    """TE's SwiGLU with a block quantizer as output."""
    tex = te_torch()
    if tex is None:
        return None
    quantizer = te_quantizer(tile=False, row=row, col=col)
    return lambda: tex.swiglu(gate_up, quantizer)


def te_swiglu_backward_quant(dy: Tensor, gate_up: Tensor) -> Run | None:
    """TE's backward of SwiGLU with a row- and column-wise block quantizer as output."""
    tex = te_torch()
    if tex is None:
        return None
    quantizer = te_quantizer(tile=False, row=True, col=True)
    return lambda: tex.dswiglu(dy, gate_up, quantizer)


def present(**peers: Run | None) -> dict[str, Run]:
    """Those that exist."""
    return {name.replace("_", " "): run for name, run in peers.items() if run is not None}
