"""Timing on a GPU and the table that comes of it: what `kernels/<op>/bench.py` and `jetrl bench kernels` share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

FLUSH_ELEMENTS = 1 << 28
"""int32 read before each repetition: 1 GiB, 20 times the L2, and 250 us in which the host gets ahead of the device."""


@dataclass
class Case:
    """One operation at one shape, with the peers that do the same work.

    bytes: read and written once each, as little as the operation can. flops: of its matmuls. target: in words.
    graph: time replays of a CUDA graph, so that the host's launch time (the same for a peer) stays out.
    """

    op: str
    shape: str
    run: Callable[[], object]
    bytes: int = 0
    flops: int = 0
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    target: str = ""
    graph: bool = True


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


@functools.cache
def _flush_buffers() -> tuple[torch.Tensor, torch.Tensor]:
    flush = torch.ones(FLUSH_ELEMENTS, dtype=torch.int32, device="cuda")
    return flush, torch.empty((), dtype=torch.int32, device="cuda")


def _sample(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events around one run with a cold L2, flushed by *reading*.

    Writing would leave dirty lines behind, whose eviction (12 us on an H200) would be charged to what is timed.
    """
    flush, sink = _flush_buffers()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.amax(flush, dim=0, out=sink)
    start.record()
    run()
    end.record()
    return start, end


def _median_us(samples: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    torch.cuda.synchronize()
    times = sorted(1e3 * start.elapsed_time(end) for start, end in samples)
    return times[len(times) // 2]


def _warm(run: Callable[[], object], graph: bool) -> Callable[[], object]:
    """`run` after two runs (compilation, allocation), as the replay of a graph if it can be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.synchronize()
    if not graph:
        return run
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured, stream=side):
            run()
    except RuntimeError:  # waits for the device inside: timed as it is
        torch.cuda.synchronize()
        return run
    return captured.replay


def time_together(runs: list[Callable[[], object]], budget_ms: float = 15.0, graph: bool = True) -> list[float]:
    """Median microseconds of each, sampled in turns so that clocks and heat are the same for all."""
    ready = [_warm(run, graph) for run in runs]
    guess = sum(_median_us([_sample(run) for _ in range(3)]) for run in ready)
    rounds = max(7, min(60, int(1e3 * budget_ms / max(guess, 1.0))))
    samples: list[list] = [[] for _ in ready]
    for _ in range(rounds):
        for run, kept in zip(ready, samples):
            kept.append(_sample(run))
    return [_median_us(kept) for kept in samples]


def time_us(run: Callable[[], object], budget_ms: float = 15.0) -> float:
    """Median microseconds of one function."""
    return time_together([run], budget_ms)[0]


def copy_bandwidth(n_bytes: int = 1 << 31) -> float:
    """GB/s of a device-to-device copy of `n_bytes`, read and written bytes both counted."""
    source = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8, device="cuda")
    into = torch.empty_like(source)
    # Not from a graph: there a copy becomes a memcpy node, which a copy engine runs at two thirds of the speed.
    return 2 * n_bytes / time_together([lambda: into.copy_(source)], 40, graph=False)[0] / 1e3


def measure(case: Case) -> Row:
    """Time a case and its peers. A peer that raises is recorded, not fatal; the operation itself must run."""
    working, failed = {}, {}
    for name, run in case.peers.items():
        try:
            run()
            torch.cuda.synchronize()
            working[name] = run
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    us, *others = time_together([case.run, *working.values()], graph=case.graph)
    return Row(case, us, dict(zip(working, others)), failed)


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
