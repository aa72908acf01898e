"""What a GPU run needs from its machine, checked before anything is built; everything missing is said at once."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import torch

from jetrl_megatron.config import Config, ConfigError
from jetrl_megatron.megatron.gpu.library import LIBRARIES

log = logging.getLogger(__name__)
HOPPER = 9
"""Major compute capability that the FP8 kernels and FlashAttention 3 are built for."""


def problems(config: Config) -> list[str]:
    """Why this process cannot train `config` on its current GPU; one line each."""
    found = []
    if not torch.cuda.is_available():
        return ["train.device: torch sees no CUDA device on this machine"]
    major, minor = torch.cuda.get_device_capability()
    if major != HOPPER:
        found.append(
            f"train.device: {torch.cuda.get_device_name()} has compute capability {major}.{minor}, and the kernels are "
            f"built for {HOPPER}.0 (H100, H200)"
        )
    if config.precision.linear_backend == "te" and importlib.util.find_spec("transformer_engine") is None:
        found.append("precision.linear_backend: transformer_engine is not installed (transformer-engine==2.19.0)")
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        found.append("vllm is not installed (vllm==0.26.0): engine, and the trainer's attention and rope, need it")
    else:
        missing = [f for f in LIBRARIES.values() if not (Path(spec.origin).parent / f).exists()]
        found += [f"vllm: {file} is missing; this vLLM was not built for CUDA" for file in missing]
    return found


def check(config: Config) -> None:
    """Raise ConfigError with every problem; only warn where a slower kernel takes over."""
    if found := problems(config):
        raise ConfigError(found)
    from jetrl_kernels.gemm_fp8 import deepgemm

    if config.precision.mode != "bf16" and deepgemm.module() is None:
        log.warning("DeepGEMM is not installed (it comes with vLLM for CUDA): FP8 GEMMs run on Triton, slower")
