"""Running many small pieces of work on all cores, with a progress bar for what takes longer than two seconds.

Threads, not processes: torch's operators and file writes release the interpreter lock, and nothing needs to be pickled.
Memory is bounded by the size of a piece times the number of threads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

Job = tuple[Callable[[], None], int]
"""What to do and how many bytes it reads, for progress."""

SHOW_AFTER_S = 2.0


def worker_count() -> int:
    """Cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def run_jobs(jobs: Sequence[Job], title: str, workers: int | None = None) -> None:
    """Run all jobs. The first exception stops those not yet started and is raised.

    The progress bar goes to stderr, and only to a terminal.
    """
    workers = min(workers or worker_count(), max(1, len(jobs)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            _progress(sum(size for _, size in jobs), title) as advance,
            ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool,
        ):
            sizes = {pool.submit(work): size for work, size in jobs}
            pending = set(sizes)
            try:
                while pending:
                    done, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    advance(sum(sizes[future] for future in done))
            except BaseException:  # Ctrl-C too: what has not started yet must not run
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _progress(total: int, title: str) -> Iterator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    bar = Progress(*columns, console=Console(stderr=True), transient=False)
    task, started, shown = bar.add_task(title, total=total), time.monotonic(), False

    def advance(count: int) -> None:
        nonlocal shown
        bar.update(task, advance=count)
        if not shown and time.monotonic() - started > SHOW_AFTER_S:
            bar.start()
            shown = True

    try:
        yield advance
    finally:
        if shown:
            bar.stop()
