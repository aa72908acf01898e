"""vLLM's compiled GPU operations without importing vLLM, which costs a trainer rank 15 s and a gigabyte."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch

LIBRARIES = {"_C": "_C_stable_libtorch.abi3.so", "_vllm_fa3_C": "vllm_flash_attn/_vllm_fa3_C.abi3.so"}
"""torch.ops namespace -> file in vLLM's folder."""


class GpuOpsError(RuntimeError):
    """The engine's GPU operations cannot be used in this process; the text says why."""


@functools.cache
def load(namespace: str, operation: str) -> None:
    """Make `torch.ops.NAMESPACE.OPERATION` available.

    Raises:
        GpuOpsError: vLLM for CUDA is not installed or has no such operation.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise GpuOpsError("vLLM is not installed: the trainer needs its GPU operations (package vllm==0.26.0)")
    path = Path(spec.origin).parent / LIBRARIES[namespace]
    if not path.exists():
        raise GpuOpsError(f"{path} does not exist: this vLLM was built for a CPU; install vllm==0.26.0 for CUDA")
    torch.ops.load_library(str(path))
    if not hasattr(getattr(torch.ops, namespace), operation):
        raise GpuOpsError(f"{path} has no {operation}: another version of vLLM than 0.26.0?")
