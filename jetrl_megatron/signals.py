"""Preemption: how "save now and come back" travels from Slurm to the training loop.

Slurm announces the end of a job by a signal: SIGUSR1 some minutes before the time limit (`--signal`), SIGTERM on
preemption or `scancel`. Depending on the site's process tracking it reaches the task's process group or *every*
process of the task, engines included. So each kind of process says what it does:

launcher (`jetrl train` on each node)   `with relay() as env:` turns a signal into a file that its ranks look for, and
                                        remembers it; torchrun's own handlers would kill the ranks before they save.
                                        Ctrl-C is such a signal too; a second one ends the run at once.
trainer rank                            `install()` at start, `stop_requested()` once a step. The answer differs
                                        between ranks: reduce it (MAX) before acting on it. Then save, and exit with
                                        `REQUEUE_EXIT_CODE`, which the launcher passes on.
engine                                  started with `preexec_fn=ignore`, or `ignore()` first thing: it must
                                        outlive the signal, or the last step is lost. End it with SIGKILL or by closing
                                        its pipe.

`slurm/task.sh` turns `REQUEUE_EXIT_CODE` into a re-queue of the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REQUEUE_EXIT_CODE = 85
"""Exit code of a run that was asked to stop, saved, and wants to be started again. `slurm/task.sh` tests for it."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""SIGINT reaches more than the launcher if it comes through Slurm: Ctrl-C of `srun`, `scancel --signal=INT`."""
STOP_FILE = "JETRL_STOP_FILE"

_received: list[str] = []


def install() -> None:
    """Remember `SIGNALS` instead of dying of them. Call from the main thread."""
    for number in SIGNALS:
        signal.signal(number, _remember)


def _remember(number: int, _frame: object) -> None:
    _received.append(signal.Signals(number).name)


def stop_requested() -> str | None:
    """Why this process should save and stop (`SIGTERM`, ...), or None. Cheap: once a step is nothing."""
    if _received:
        return _received[0]
    path = os.environ.get(STOP_FILE)
    if path and Path(path).exists():
        return Path(path).read_text() or "stop file"
    return None


def ignore() -> None:
    """Let `SIGNALS` pass without effect; inherited by `exec`, so it works as a `preexec_fn`."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def relay(second: Callable[..., Any] = signal.default_int_handler) -> Iterator[dict[str, str]]:
    """In the launcher: a signal during the block becomes a file. Yields what to add to the children's environment.

    Args:
        second: handles the Ctrl-C after the first one.
    """
    with tempfile.TemporaryDirectory(prefix="jetrl-stop-") as folder:
        path = Path(folder) / "stop"

        def write(number: int, frame: object) -> None:
            _remember(number, frame)
            part = path.with_suffix(".part")
            part.write_text(signal.Signals(number).name)
            # A second signal may arrive in between, and its handler has then renamed the file already.
            with contextlib.suppress(FileNotFoundError):
                part.rename(path)
            if number == signal.SIGINT:
                signal.signal(number, second)
                said = "Ctrl-C: finishing what is under way and saving it; once more stops at once"
                print(f"\n{said}", file=sys.stderr, flush=True)

        # Ignored in what a script runs in the background: Ctrl-C is then not meant for it.
        deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        before = {n: signal.signal(n, write) for n in SIGNALS if not (deaf and n == signal.SIGINT)}
        try:
            yield {STOP_FILE: str(path)}
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
