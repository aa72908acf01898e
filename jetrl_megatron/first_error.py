"""Which rank failed first, over all nodes of a job.

When one rank fails, every other rank fails a moment later with "Connection closed by peer", and each node's torchrun
reports its own. So each node's launcher writes its first failure into `<run folder>/errors`, under a name that sorts
causes before consequences and early before late. `slurm/job.sh` prints the first file when the job has ended.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl_megatron import signals

LATE = re.compile(r"Socket Timeout|Timed out waiting \d+ms for")
"""What a rank says that waited too long for another."""
CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|remote process exited|"
    rf"torch\.distributed\.DistNetworkError|Connection refused|{LATE.pattern}"
)
"""What a rank says whose partner has gone, or does not answer."""


def is_consequence(exitcode: int, text: str) -> bool:
    """Whether a failure follows from elsewhere: told to stop by torchrun or Slurm, or the rank's partner has gone."""
    return exitcode in [-number for number in signals.SIGNALS] or CONSEQUENCE.search(text) is not None


def all_stopped(failures: Mapping[int, Any], asked: bool) -> bool:
    """Whether a node's ranks ended because the run was to stop, and none for a reason of its own.

    Args:
        asked: whether this node was told to stop. A rank that is still starting dies of Slurm's signal itself, and its
            partners of its absence; nothing was lost.
    """
    saved = [failure.exitcode == signals.REQUEUE_EXIT_CODE for failure in failures.values()]
    rest = [f for f, done in zip(failures.values(), saved) if not done]
    return (asked or any(saved)) and all(is_consequence(f.exitcode, _text(f)) for f in rest)


def write(run_folder: Path, node_rank: int, failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Record this node's first failure.

    Args:
        failures: global rank -> torch.distributed.elastic's ProcessFailure (`ChildFailedError.failures` holds them).

    Returns:
        (rank, failure) of the one recorded.
    """
    # Then nobody had died before: it is torchrun that killed the one that was waited for.
    waited = any(LATE.search(_text(f)) for f in failures.values())

    def order_of(failure: Any) -> tuple[int, int]:
        if waited and failure.exitcode == -signal.SIGKILL:
            return 2, failure.timestamp
        return int(is_consequence(failure.exitcode, _text(failure))), failure.timestamp

    rank, failure = min(failures.items(), key=lambda item: order_of(item[1]))
    text = _text(failure)
    job = f"{os.environ.get('SLURM_JOB_ID', 'local')}-{os.environ.get('SLURM_RESTART_COUNT') or 0}"
    order = f"{int(is_consequence(failure.exitcode, text))}-{failure.timestamp}-node{node_rank}"
    folder = run_folder / "errors"
    status = f"was killed by {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else "failed"
    record = f"rank {rank} on {socket.gethostname()} {status}\n{text.rstrip()}\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{job}-{order}.txt").write_text(record)
    except OSError:  # a full disk, which is most likely what the record is about
        print(record, file=sys.stderr)
    return rank, failure


def _text(failure: Any) -> str:
    """The traceback if the rank left one, else the message."""
    message = failure.message
    if isinstance(message, dict):
        extra = message.get("extraInfo") or {}
        return str(extra.get("py_callstack") or message.get("message") or message)
    return str(message)
