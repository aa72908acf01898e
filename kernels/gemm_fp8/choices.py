"""Measured choices among GEMM backends on an H200 (RESULTS.md), as functions of shapes only."""

from __future__ import annotations

FPROP: dict[tuple[int, int], str] = {}
"""(N, K) whose FProp does not run on DeepGEMM."""
OWN_KERNEL = 4096
"""DeepGEMM's WGrad has kernels of their own for numbers of tokens that this divides: few, because each costs seconds of
nvcc."""


def fprop(out_features: int, in_features: int) -> str:
    """`deepgemm` or `triton` (batch-invariant both) for a weight [out, in]; the number of rows has no say."""
    return FPROP.get((out_features, in_features), "deepgemm")


def dgrad(tokens: int, in_features: int, out_features: int) -> str:
    """`deepgemm` or `cublaslt` for dX [tokens, in]."""
    deep = out_features >= 24576 and in_features <= 5120
    uneven = (out_features, in_features) == (4096, 14336)  # DeepGEMM's second wave of tiles is two thirds empty
    return "cublaslt" if (deep or uneven) and 128 < tokens <= 512 else "deepgemm"


def wgrad(tokens: int, out_features: int, in_features: int) -> str:
    """`deepgemm` or `cublaslt` for dW [out, in] summed over `tokens`.

    DeepGEMM is up to 9 % faster than cuBLASLt with a kernel for this number of tokens, and slower without.
    """
    own_kernel = tokens % OWN_KERNEL == 0 and out_features * in_features > 4096 * 4096
    return "deepgemm" if own_kernel else "cublaslt"
