"""Measured choices among GEMM backends on an H200 (RESULTS.md), as functions of shapes only."""

from __future__ import annotations

FPROP: dict[tuple[int, int], str] = {}
"""(N, K) whose FProp does not run on DeepGEMM."""


def fprop(out_features: int, in_features: int) -> str:
    """`deepgemm` or `triton` (batch-invariant both) for a weight [out, in]; the number of rows has no say."""
    return FPROP.get((out_features, in_features), "deepgemm")


def dgrad(tokens: int, in_features: int, out_features: int) -> str:
    """`deepgemm` or `cublaslt` for dX [tokens, in]."""
    deep = out_features >= 24576 and in_features <= 5120
    uneven = (out_features, in_features) == (4096, 14336)  # DeepGEMM's second wave of tiles is two thirds empty
    return "cublaslt" if (deep or uneven) and 128 < tokens <= 512 else "deepgemm"


def wgrad(tokens: int, out_features: int, in_features: int) -> str:
    """`deepgemm` or `cublaslt` for dW [out, in] summed over `tokens`."""
    return "cublaslt" if tokens <= 512 or out_features * in_features <= 4096 * 4096 else "deepgemm"
