"""Timing on a GPU and the table that comes of it: what `kernels/<op>/bench.py` and `jetrl bench kernels` share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Case:
    """One operation at one shape, with the peers that do the same work.

    bytes: read and written once each, as little as the operation can. flops: of its matmuls. target: in words.
    """

    op: str
    shape: str
    run: Callable[[], object]
    bytes: int = 0
    flops: int = 0
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    target: str = ""


@dataclass
class Row:
    """What was measured of a case. Times in microseconds; a peer that failed has its message in `failed`."""

    case: Case
    us: float
    peers: dict[str, float]
    failed: dict[str, str]

    @property
    def gb_per_s(self) -> float:
        return self.case.bytes / self.us / 1e3

    @property
    def tflops(self) -> float:
        return self.case.flops / self.us / 1e6


def time_us(run: Callable[[], object], rep_ms: int = 40) -> float:
    """Median microseconds of `run` by device events, with a cold L2 before each repetition.

    The L2 is flushed by *reading* 256 MiB. Writing them would leave dirty lines behind, whose eviction (12 us on an
    H200) would be charged to what is timed.
    """
    flush = torch.empty(1 << 26, dtype=torch.int32, device="cuda").fill_(1)
    sink = torch.empty((), dtype=torch.int32, device="cuda")
    for _ in range(2):
        run()
    torch.cuda.synchronize()

    def once() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        torch.amax(flush, dim=0, out=sink)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        return start, end

    def elapsed(pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        torch.cuda.synchronize()
        return sorted(1e3 * start.elapsed_time(end) for start, end in pairs)

    guess = elapsed([once() for _ in range(3)])[1]
    count = max(5, min(200, int(1e3 * rep_ms / max(guess, 1.0))))
    return elapsed([once() for _ in range(count)])[count // 2]


def copy_bandwidth(n_bytes: int = 1 << 31) -> float:
    """GB/s of a device-to-device copy of `n_bytes`, read and written bytes both counted."""
    source = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8, device="cuda")
    into = torch.empty_like(source)
    return 2 * n_bytes / time_us(lambda: into.copy_(source), 100) / 1e3


def measure(case: Case) -> Row:
    """Time a case and its peers. A peer that raises is recorded, not fatal; the operation itself must run."""
    us, peers, failed = time_us(case.run), {}, {}
    for name, run in case.peers.items():
        try:
            peers[name] = time_us(run)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Row(case, us, peers, failed)


def geometric_mean(ratios: list[float]) -> float:
    """exp(mean(log)); NaN of nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def table(rows: list[Row], copy_gb_s: float) -> list[str]:
    """Markdown lines: one row for each case, then the geometric mean against each peer."""
    memory_bound = all(row.case.bytes for row in rows)
    lines = [
        "| operation | shape | us | "
        + ("GB/s | of copy" if memory_bound else "TFLOP/s")
        + " | peers (us, peer time / ours) |",
        "|---|---|---|" + ("---|---|" if memory_bound else "---|") + "---|",
    ]
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name, us in row.peers.items():
            ratios.setdefault(name, []).append(us / row.us)
        speed = f"{row.gb_per_s:.0f} | {row.gb_per_s / copy_gb_s:.2f}" if memory_bound else f"{row.tflops:.0f}"
        peers = [f"{name} {us:.1f} ({us / row.us:.2f}x)" for name, us in row.peers.items()]
        peers += [f"{name}: {message}" for name, message in row.failed.items()]
        lines.append(f"| {row.case.op} | {row.case.shape} | {row.us:.1f} | {speed} | {'; '.join(peers)} |")
    means = [f"{name} {geometric_mean(r):.2f}x over {len(r)}" for name, r in ratios.items()]
    return [*lines, "", f"Geometric mean against peers: {'; '.join(means) or 'none'}."]
