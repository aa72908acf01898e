"""The cause is shown, not its consequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from jetrl_megatron import first_error


@dataclass
class Failure:
    """The fields of torch.distributed.elastic's ProcessFailure that are read."""

    exitcode: int
    timestamp: int
    message: object


GONE = {
    "message": "x",
    "extraInfo": {"py_callstack": "RuntimeError: [...pair.cc:547] Connection closed by peer [10.0.0.2]"},
}
CAUSE = {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback ...\nValueError: bad\n"}}


def test_cause_comes_first_over_nodes_even_with_skewed_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    first_error.write(tmp_path, 0, {0: Failure(1, 100, GONE), 1: Failure(-15, 99, "Signal 15 (SIGTERM) received")})
    first_error.write(tmp_path, 1, {2: Failure(1, 101, GONE), 3: Failure(1, 101, CAUSE)})
    files = sorted((tmp_path / "errors").iterdir())
    assert [f.name for f in files] == ["12-1-0-101-node1.txt", "12-1-1-99-node0.txt"]
    assert files[0].read_text().startswith("rank 3 on ")
    assert files[0].read_text().endswith("failed\nTraceback ...\nValueError: bad\n")


def test_a_killed_rank_is_a_cause(tmp_path: Path):
    """The kernel's out-of-memory killer leaves no traceback."""
    rank, _ = first_error.write(tmp_path, 0, {0: Failure(1, 7, GONE), 1: Failure(-9, 8, "Signal 9 (SIGKILL) received")})
    assert rank == 1
    (file,) = (tmp_path / "errors").iterdir()
    assert "rank 1" in file.read_text() and "was killed by SIGKILL" in file.read_text()


def test_a_rank_that_was_waited_for_and_killed_by_torchrun_is_no_cause(tmp_path: Path):
    """It hung (here: on a busy machine); torchrun kills what SIGTERM does not end. Nobody ran out of memory."""
    late = {"message": "x", "extraInfo": {"py_callstack": "RuntimeError: [...] Timed out waiting 300000ms for recv"}}
    rank, _ = first_error.write(tmp_path, 0, {0: Failure(-9, 5, "Signal 9 (SIGKILL) received"), 1: Failure(1, 9, late)})
    assert rank == 1


def test_ranks_that_stop_when_asked_have_not_failed():
    saved, told = Failure(85, 1, "x"), Failure(-15, 1, "Signal 15 (SIGTERM) received")
    assert first_error.all_stopped({0: saved, 1: told}, asked=False)
    assert first_error.all_stopped({0: told, 1: Failure(1, 2, GONE)}, asked=True), "still starting"
    assert not first_error.all_stopped({0: told}, asked=False)
    assert not first_error.all_stopped({0: saved, 1: Failure(1, 1, CAUSE)}, asked=True)
    assert not first_error.all_stopped({0: Failure(-9, 1, "Signal 9")}, asked=True)
