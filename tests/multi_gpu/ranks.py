"""Processes of a multi-GPU test: each on a GPU of its own or, where there are fewer, all on the first one.

NCCL refuses two ranks on one GPU, unless NCCL_HOSTID says that they are on different hosts. It then sends over sockets:
every line of the program runs as between nodes, and nothing is learned about speed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
LINES = 25
"""Of each process's log in a failure."""


def shared(count: int) -> bool:
    """Whether `count` processes have to share one GPU."""
    return torch.cuda.device_count() < count


def apart(index: int, count: int) -> dict[str, str]:
    """Variables that make NCCL and gloo take process `index` of `count` for a host of its own, if GPUs are shared."""
    if not shared(count):
        return {}
    return {
        "NCCL_HOSTID": f"host{index}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def node(index: int, count: int) -> dict[str, str]:
    """Variables of a process that is a node with one GPU."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return {"CUDA_VISIBLE_DEVICES": names.split(",")[0 if shared(count) else index], **apart(index, count)}


def rank(index: int, count: int, port: int) -> dict[str, str]:
    """Variables of a rank, as torchrun would set them; ranks are on one node."""
    return {
        "RANK": str(index),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0" if shared(count) else str(index),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **apart(index, count),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_the_test() -> None:
    multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)


class Processes:
    """`python COMMAND` once for each set of variables; logs are FOLDER/NAME-INDEX.log. Ended with the block."""

    def __init__(self, name: str, command: Sequence[str], environments: Sequence[dict[str, str]], folder: Path):
        self.name, self.logs = name, [folder / f"{name}-{i}.log" for i in range(len(environments))]
        self.running = []
        for log, variables in zip(self.logs, environments):
            with log.open("w") as out:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    preexec_fn=_end_with_the_test,
                )
            self.running.append(process)

    def wait(self, timeout_s: float, expected: Sequence[int] | None = None) -> None:
        """Until all have ended; a few seconds more once one has failed: the others say what they miss.

        Raises:
            AssertionError: exit statuses other than `expected` (all 0), with the last lines of every log.
        """
        expected = list(expected or [0] * len(self.running))
        deadline = time.monotonic() + timeout_s
        while (codes := [p.poll() for p in self.running]).count(None) and time.monotonic() < deadline:
            if any(code not in (None, wanted) for code, wanted in zip(codes, expected)):
                deadline = min(deadline, time.monotonic() + 5)
            time.sleep(0.1)
        self.close()
        assert codes == expected, f"{self.name}: exit statuses {codes}, not {expected}\n" + "\n".join(
            f"--- {log.name}\n{self.tail(log)}" for log in self.logs
        )

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def tail(log: Path) -> str:
        return "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])
