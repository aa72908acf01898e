"""`jetrl bench kernels`: time every kernel beside its peers on this GPU and write kernels/RESULTS.md."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer


def bench_kernels(
    only: Annotated[str, typer.Option(help="Comma-separated operations; all by default.")] = "",
    out: Annotated[Path | None, typer.Option(help="File to write; kernels/RESULTS.md by default.")] = None,
    warm: Annotated[int, typer.Option(help="First compile GEMM kernels in this many processes.")] = 0,
    commit: Annotated[str, typer.Option(help="Commit to record, where there is no git folder.")] = "",
) -> None:
    """Time all kernels on a Hopper GPU (L2 flushed, random data) against TE, vLLM, DeepGEMM and PyTorch.

    Example: jetrl bench kernels --only quant_act,swiglu --out /tmp/results.md
    """
    import torch

    from jetrl_kernels import bench_report
    from jetrl_megatron.config import ConfigError

    wanted = tuple(filter(None, only.split(","))) or bench_report.OPERATIONS
    problems = [
        f"--only: {name!r} is no operation; there are {', '.join(bench_report.OPERATIONS)}"
        for name in wanted
        if name not in bench_report.OPERATIONS
    ]
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        problems.append("jetrl bench kernels needs a Hopper GPU (compute capability 9.0); none was found")
    if problems:
        raise ConfigError(problems)
    if warm:
        from jetrl_kernels.gemm_fp8.warm import warm as warm_up

        warm_up(warm)
    commit = commit or _commit()
    body = bench_report.run(wanted, lambda line: print(line, file=sys.stderr, flush=True))
    command = shlex.join(["jetrl", "bench", "kernels", *(["--only", only] if only else [])])
    head = ["# Kernels: what was measured", "", *(f"* {line}" for line in bench_report.versions())]
    head += [f"* commit: {commit}", f"* command: `{command}`"]
    head.append(
        "* median device time of CUDA graph replays (one graph for each function), sampled in turns with the peers; "
        "L2 flushed (by reading 1 GiB) before each sample; random data"
    )
    target = out or Path(bench_report.__file__).resolve().parent / "RESULTS.md"
    target.write_text("\n".join([*head, "", *body]).rstrip() + "\n")
    print(f"wrote {target}")


def _commit() -> str:
    try:
        run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


if __name__ == "__main__":
    typer.run(bench_kernels)
