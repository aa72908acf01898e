"""DeepGEMM (Hopper), as it comes inside the vLLM wheel or on its own.

Kernels are compiled by nvcc at first use and kept in DG_JIT_CACHE_DIR; where that is not set, in the folder that vLLM
uses, so that trainer and engine share them.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from jetrl_kernels.formats import BLOCK
from jetrl_kernels.gemm_fp8.choices import OWN_KERNEL

FP32_ROWS = 64
"""Rows of A that the kernel into FP32 needs: up to 32 DeepGEMM picks a tile for it that does not compile."""


@functools.cache
def module() -> ModuleType | None:
    """The deep_gemm module, or None without one or without a Hopper GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    default = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "vllm")
    os.environ.setdefault("DG_JIT_CACHE_DIR", os.path.join(os.environ.get("VLLM_CACHE_ROOT", default), "deep_gemm"))
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            return importlib.import_module(name)
        except (ImportError, RuntimeError, AssertionError):  # the last two: no nvcc, incomplete wheel
            continue
    return None


def accepts(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether DeepGEMM takes these: whole K-blocks, contiguous along K, 16-byte aligned rows, some row."""
    aligned = all(t.is_contiguous() and t.shape[1] % BLOCK == 0 and t.data_ptr() % 16 == 0 for t in (a, b))
    return aligned and out.is_contiguous() and out.shape[1] * out.element_size() % 16 == 0 and a.shape[0] > 0


def gemm_nt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> Tensor:
    """out [M, N] BF16 = A B^T with 1x128 scales of A [M, K] and 128x128 scales of B [N, K]."""
    _loaded().fp8_gemm_nt((a, a_scale), (b, b_scale), out, disable_ue8m0_cast=True)
    return out


def gemm_nt_fp32(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> Tensor:
    """As `gemm_nt` into FP32: the kernel with one scale for each row of B, given the tiles' scales repeated."""
    per_row = b_scale.t().repeat_interleave(BLOCK, 1)[:, : b.shape[0]]
    padded = torch.empty((per_row.shape[0], -(-b.shape[0] // 4) * 4), dtype=torch.float32, device=b.device)
    per_row = padded[:, : b.shape[0]].copy_(per_row).t()
    rows = a.shape[0]
    if rows >= FP32_ROWS:
        return _add_nt(a, a_scale, b, per_row, out.zero_(), "nk")
    codes = torch.zeros((FP32_ROWS, a.shape[1]), dtype=torch.uint8, device=a.device).view(a.dtype)
    scale = torch.ones((a_scale.shape[1], FP32_ROWS), dtype=torch.float32, device=a.device).t()
    codes.view(torch.uint8)[:rows] = a.view(torch.uint8)
    scale[:rows] = a_scale
    result = torch.zeros((FP32_ROWS, b.shape[0]), dtype=torch.float32, device=a.device)
    return out.copy_(_add_nt(codes, scale, b, per_row, result, "nk")[:rows])


def wgrad_nt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> Tensor:
    """out [M, N] FP32 += A B^T with 1x128 scales of both ([M, K blocks] and [N, K blocks], stride 1 along rows)."""
    # K is the number of tokens. Compiled in it makes the kernel faster, with the same bits, but then every new length
    # of a micro-batch costs seconds of nvcc (figures: docs/kernels.md).
    return _add_nt(a, a_scale, b, b_scale, out, "mn" if a.shape[1] % OWN_KERNEL else "nk")


def grouped_nt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, expert_of_row: Tensor, out: Tensor) -> Tensor:
    """out [T, N] BF16: row i of A times B[expert_of_row[i]]^T; blocks of 128 rows share an expert (-1: skipped)."""
    _loaded().m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, expert_of_row, disable_ue8m0_cast=True)
    return out


def _add_nt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, compiled_dims: str) -> Tensor:
    """`wgrad_nt`; sizes named in `compiled_dims` are constants of the kernel, the others its arguments."""
    _loaded().fp8_gemm_nt(
        (a, a_scale),
        (b, b_scale),
        out,
        c=out,
        recipe=(1, 1, BLOCK),
        compiled_dims=compiled_dims,
        disable_ue8m0_cast=True,
    )
    return out


def _loaded() -> ModuleType:
    loaded = module()
    assert loaded is not None, "call module() first"
    return loaded
