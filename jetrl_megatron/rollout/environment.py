"""The environment of an engine process: the only place where it is made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

FOREIGN = re.compile(
    r"TORCHELASTIC_.*|TORCH_NCCL_.*|PET_.*|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME"
)
"""Rendezvous variables of the trainer's torchrun: an engine that sees them tries to join that world and hangs."""


def engine_environment(
    threads: int, *, cpu: bool, devices: Sequence[int | str] | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables for one engine process.

    Args:
        threads: OpenMP threads of the process.
        cpu: whether the engine runs on the CPU.
        devices: CUDA devices it may see; None leaves the caller's choice.
        base: the caller's environment, `os.environ` by default.
    """
    env = {k: v for k, v in (os.environ if base is None else base).items() if not FOREIGN.fullmatch(k)}
    env |= {
        # The engine lives in its server process: one process to start, to watch and to kill.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "jetrl",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        # Waiting threads sleep. Spinning, they starve each other (and the trainer) whenever there are more threads than
        # cores: measured 1.5 ms against 270 ms for one small FP8 linear on two busy cores.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if cpu:
        env |= {
            # Without compilation a tiny engine starts in 4 s instead of 50 s.
            "TORCHDYNAMO_DISABLE": "1",
            # Split sums of long contexts would depend on the number of threads and on the batch.
            "VLLM_CPU_ATTN_SPLIT_KV": "0",
            # Each worker of a tensor-parallel engine would claim a NUMA node for itself.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return env
    env |= {
        # Compiling over a thousand GEMM shapes at start would take minutes; those in use are compiled and kept.
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        # FlashInfer's sampler is compiled at start, and only cut distributions would use it.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    return env
