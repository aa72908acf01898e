"""Two GPUs as two nodes: a trainer rank on one sends to a receiver on the other by NCCL, in chunks.

The code is that of the gloo tests with tensors on GPUs. Compared with a plain NCCL send of as many bytes in the same
run, and with gathering BF16, broadcasting it and quantizing again; not where both ranks share a GPU.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from ranks import Processes, free_port, needs_hopper, rank, shared

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(600), needs_hopper]

SCRIPT = str(Path(__file__).with_name("nccl_ranks.py"))
PLAIN, RIVAL = 0.8, 5.0
SMALL = ("Qwen3-0.6B", "2")


@pytest.mark.alone
def test_bytes_arrive_at_the_speed_of_the_link(tmp_path: Path) -> None:
    port, model = free_port(), SMALL if shared(2) else ("Qwen3-8B", "8")
    environments = [rank(index, 2, port) for index in range(2)]
    with Processes("speed", [SCRIPT, "speed", str(port), *model], environments, tmp_path) as running:
        running.wait(150 if shared(2) else 500)
    found = json.loads(running.logs[0].read_text().splitlines()[-1])
    print(found)
    assert found["digests_equal"]
    assert found["chunks"] > 1
    if shared(2):
        pytest.skip(f"the bytes are right; speeds are not compared: both ranks share a GPU ({found})")
    assert found["refit"] < found["plain"] / PLAIN, found
    assert found["rival"] > RIVAL * found["refit"], found


def test_a_receiver_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """The sender outlives it, and says so before its time-out; the next one gets the whole version."""
    port, running = free_port(), []
    roles = {"lead": 0, "victim": 1, "replacement": 1}
    try:
        for number, (role, index) in enumerate(roles.items()):
            environment = rank(index, 2, port)
            if shared(2):
                environment["NCCL_HOSTID"] = f"host{number}"
            running.append(Processes(role, [SCRIPT, role, str(port), *SMALL], [environment], tmp_path))
        running[0].wait(120)
        running[1].wait(1, [-signal.SIGKILL])
        running[2].wait(10)
    finally:
        for processes in running:
            processes.close()
    found = json.loads(running[0].logs[0].read_text().splitlines()[-1])
    print(found)
    assert "member 0" in found["failed"]
    assert found["seconds"] < 25
    assert found["digests_equal"]
