"""Compile the GEMM kernels of the benchmark's shapes ahead of time, one share of them in this process.

    python -m jetrl_kernels.gemm_fp8.warm INDEX COUNT

DeepGEMM compiles a kernel for each (N, K) and tile shape, some seconds each; several processes share its disk cache.
"""

from __future__ import annotations

import subprocess
import sys

import torch


def warm_share(index: int, count: int) -> None:
    """Run every backend once on share `index` of `count` of the benchmark's (weight, tokens) pairs."""
    from jetrl_kernels.gemm_fp8 import bench

    pairs = [(name, shape, tokens) for name, shape in bench.WEIGHTS.items() for tokens in bench.TOKENS]
    for name, shape, tokens in pairs[index::count]:
        for case in bench.cases({name: shape}, (tokens,)):
            for run in (case.run, *case.peers.values()):
                try:
                    run()
                except Exception as error:  # a peer that cannot run is reported by the benchmark itself
                    print(f"{case.op} {case.shape}: {type(error).__name__}", file=sys.stderr)
    torch.cuda.synchronize()


def warm(processes: int) -> list[int]:
    """Exit codes of `processes` processes that share the work."""
    command = [sys.executable, "-m", "jetrl_kernels.gemm_fp8.warm"]
    running = [subprocess.Popen([*command, str(index), str(processes)]) for index in range(processes)]
    return [process.wait() for process in running]


if __name__ == "__main__":
    warm_share(int(sys.argv[1]), int(sys.argv[2]))
