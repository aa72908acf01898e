"""Follow a Slurm job: its logs as they grow, over re-queues, to its end. Needs `scontrol` only, no accounting."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

FINAL = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)
EVERY_S = 1.0


def state(job_id: str) -> tuple[str, int]:
    """(state, exit status) of a job; `UNKNOWN` where Slurm does not answer (or has forgotten it)."""
    shown = subprocess.run(["scontrol", "show", "job", job_id], capture_output=True, text=True)
    words = dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)
    if "JobState" not in words:
        return "UNKNOWN", 1
    status, _, number = words.get("ExitCode", "1:0").partition(":")
    return words["JobState"], int(status) or (128 + int(number) if int(number) else 0)


def follow(job_id: str, folder: Path, out: TextIO | None = None) -> int:
    """Print what the job writes to the `*_<job id>*.out` files of `folder` until it ends; returns its exit status.

    Interrupting (Ctrl-C) leaves the job alone.
    """
    stream: TextIO = sys.stdout if out is None else out
    read: dict[Path, int] = {}
    unknown = 0
    while True:
        now, status = state(job_id)
        for file in sorted(folder.glob(f"*_{job_id}*.out"), key=lambda f: f.stat().st_mtime):
            with file.open(errors="replace") as text:
                text.seek(read.get(file, 0))
                stream.write(text.read())
                read[file] = text.tell()
        stream.flush()
        unknown = unknown + 1 if now == "UNKNOWN" else 0
        if now in FINAL:
            stream.write(f"job {job_id}: {now}\n")
            return status if now == "COMPLETED" else status or 1
        if unknown > 60:
            stream.write(f"job {job_id}: Slurm does not know it any more\n")
            return 1
        time.sleep(EVERY_S)
