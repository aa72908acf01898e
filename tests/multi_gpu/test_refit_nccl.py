"""GPUs as nodes: trainer ranks send to receivers by NCCL. What it costs: `jetrl bench refit --nccl`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import Processes, free_port, needs_hopper, rank, shared

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300), needs_hopper]

SCRIPT = str(Path(__file__).with_name("nccl_ranks.py"))
MODEL, LAYERS = "Qwen3-0.6B", "2"


@pytest.mark.parametrize(
    ("trainer", "rollout_tp", "gpus"), [("tp=1", 1, 2), ("tp=2", 1, 3), ("pp=2", 2, 4), ("tp=2", 2, 4)]
)
def test_all_ways_leave_the_same_bytes(trainer: str, rollout_tp: int, gpus: int) -> None:
    """The benchmark compares what the replicas hold after each of its ways."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, one for each rank")
    command = ["-m", "jetrl_megatron.cli", "bench", "refit", MODEL, "--nccl", "--layers", LAYERS, "--rounds", "1"]
    command += ["--trainer", trainer, "--rollout-tp", str(rollout_tp)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ways"]["ours"]["moved"] == found["bound"]


def test_a_receiver_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """The sender outlives it, and says so before its time-out; the next one gets the whole version."""
    port, running = free_port(), []
    roles = {"lead": 0, "victim": 1, "replacement": 1}
    try:
        for number, (role, index) in enumerate(roles.items()):
            environment = rank(index, 2, port)
            if shared(2):
                environment["NCCL_HOSTID"] = f"host{number}"
            running.append(Processes(role, [SCRIPT, role, str(port), MODEL, LAYERS], [environment], tmp_path))
        running[0].wait(120)
        running[1].wait(1, [-signal.SIGKILL])
        running[2].wait(10)
    finally:
        for processes in running:
            processes.close()
    found = json.loads(running[0].logs[0].read_text().splitlines()[-1])
    print(found)
    assert found["straight"] > 8 and found["buffered"] > 0
    assert "member 0" in found["failed"]
    assert found["seconds"] < 25
    assert found["digests_equal"]
