"""Run the benchmarks of all operations and say, for each target, whether it was reached: the body of RESULTS.md."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable

import torch

from jetrl_kernels.bench_lib import Row, copy_bandwidth, geometric_mean, measure, table

OPERATIONS = (
    "quant_act",
    "quant_weight",
    "master_cast",
    "rms_norm",
    "swiglu",
    "digest",
    "fused_logprob",
    "fp8_linear",
    "gemm_fp8",
)
INVARIANT = ("deepgemm", "triton")
"""GEMM backends whose result for a row does not depend on the other rows."""


def versions() -> list[str]:
    """Lines: GPU, driver, and the packages whose kernels were timed."""
    lines = [f"GPU: {torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).multi_processor_count} SMs"]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines.append(f"driver: {subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()}")
    except (OSError, subprocess.CalledProcessError):
        lines.append("driver: unknown")
    packages = [f"torch {torch.__version__} (CUDA {torch.version.cuda})"]
    for name in ("triton", "vllm", "transformer_engine", "vllm.third_party.deep_gemm"):
        try:
            packages.append(f"{name} {importlib.import_module(name).__version__}")
        except Exception:
            packages.append(f"{name} not installed")
    return [*lines, ", ".join(packages)]


def memory_verdicts(rows: list[Row], copy: float) -> list[str]:
    """Targets given as a share of copy bandwidth, and at least 1.0x of each peer."""
    lines = []
    for row in rows:
        if row.case.target.endswith("of copy"):
            want, got = float(row.case.target.split()[0]), row.gb_per_s / copy
            slower = [f"{n} {us / row.us:.2f}x" for n, us in row.peers.items() if us < row.us]
            if got < want or slower:
                missed = f"{got:.2f} of copy, target {want:.2f}" if got < want else f"{got:.2f} of copy"
                slow = f"; slower than {', '.join(slower)}" if slower else ""
                lines.append(f"* not reached: {row.case.op}, {row.case.shape}: {missed}{slow}")
    return lines or ["* all targets reached"]


def gemm_verdicts(rows: list[Row]) -> list[str]:
    """DGrad and WGrad against the best peer, FProp against the best batch-invariant one, and what that costs."""
    lines = []
    for op in ("fprop", "dgrad", "wgrad"):
        mine = [row for row in rows if row.case.op == op and row.peers]
        if not mine:
            continue
        best = [(min(row.peers.values()) / row.us, row.case.shape) for row in mine]
        worst = min(best)
        below = [f"{shape} ({ratio:.2f})" for ratio, shape in best if ratio < 0.98]
        mean = geometric_mean([r for r, _ in best])
        lines.append(f"* {op}, best of all peers / ours: geometric mean {mean:.3f}, lowest {worst[0]:.2f} ({worst[1]})")
        if op == "fprop":
            held = [
                (min(us for n, us in row.peers.items() if n in INVARIANT) / row.us, row.case.shape)
                for row in mine
                if set(INVARIANT) & set(row.peers)
            ]
            below = [f"{shape} ({ratio:.2f})" for ratio, shape in held if ratio < 0.98]
            lines.append(f"* fprop, best batch-invariant peer / ours: lowest {min(held)[0]:.2f} ({min(held)[1]})")
        lines.append(
            f"* {op}: below 0.98 at {len(below)} of {len(mine)} shapes{': ' if below else ''}{', '.join(below)}"
        )
    return lines


def linear_verdicts(rows: list[Row]) -> list[str]:
    """fp8_linear against TE's BF16 linear, target 1.41x."""
    return [
        f"* {row.case.shape}: {row.peers['TE BF16'] / row.us:.2f}x TE BF16 (target 1.41x), "
        f"TE FP8 {row.peers['TE BF16'] / row.peers['TE FP8']:.2f}x"
        for row in rows
        if row.case.op == "fp8_linear fwd+bwd" and {"TE BF16", "TE FP8"} <= set(row.peers)
    ]


def run(operations: tuple[str, ...], say: Callable[[str], None]) -> list[str]:
    """Markdown of the operations' sections; `say` receives each row as it is measured."""
    copy = copy_bandwidth()
    lines = [f"Device-to-device copy of 2 GiB: {copy:.0f} GB/s, read and written bytes counted.", ""]
    for operation in operations:
        bench = importlib.import_module(f"jetrl_kernels.{operation}.bench")
        rows = []
        for case in bench.cases():
            rows.append(measure(case))
            say(f"{operation}: {rows[-1].case.op} {rows[-1].case.shape} {rows[-1].us:.1f} us")
        lines += [f"## {operation}", ""]
        parts = [row for row in rows if row.case.op.startswith("part: ")]
        whole = [row for row in rows if row not in parts]
        lines += [*table(whole, copy), ""]
        if parts:
            lines += ["Parts of the time:", "", *table(parts, copy), ""]
        if operation == "gemm_fp8":
            lines += gemm_verdicts(rows)
        elif operation == "fp8_linear":
            lines += linear_verdicts(rows)
        elif operation == "fused_logprob":
            sizes = [(2048, 32768), (2048, 151936), (8192, 151936)]
            peaks = [f"{t} x {v}: {bench.peak_bytes(t, v) / 2**20:.0f} MiB" for t, v in sizes]
            lines.append(f"* peak memory above inputs and gradients, tokens x vocabulary: {', '.join(peaks)}")
        else:
            lines += memory_verdicts(rows, copy)
        lines.append("")
        torch.cuda.empty_cache()
    return lines
