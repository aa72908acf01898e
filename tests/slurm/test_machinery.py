"""Rendezvous, failure, preemption and re-queue of the batch scripts, on a real Slurm, without a trainer (probe.py)."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from cluster import HERE, REPO, Cluster
from probe import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PATIENCE = 400
"""Seconds for a job of a few seconds, on a machine that is busy with other things."""


def submit(slurm: Cluster, folder: Path, *args: str) -> str:
    env = {"JETRL_ROOT": str(REPO), "JETRL_RUN_DIR": str(folder)}
    return slurm.run(
        "sbatch", "--parsable", "-N2", str(HERE / "probe.sbatch"), *args, cwd=folder, env=env
    ).stdout.strip()


def log(folder: Path, job: str) -> str:
    file = folder / f"probe-{job}.log"
    return file.read_text() if file.exists() else ""


def counted(text: str) -> list[int]:
    return [int(line.split()[-1]) for line in text.splitlines() if line.startswith("0: count ")]


def wait_for_count(folder: Path, job: str, n: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while n not in counted(log(folder, job)):
        assert time.monotonic() < deadline, log(folder, job)
        time.sleep(0.2)


def test_nodes_meet_and_are_separate(slurm: Cluster, shared: Path):
    job = submit(slurm, shared, "sum", str(shared))
    assert slurm.wait(job, timeout=PATIENCE)["JobState"] == "COMPLETED", log(shared, job)
    assert "sum 6 over 4 ranks on n1,n1,n2,n2" in log(shared, job)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in log(shared, job)
    (shared / "marker").touch()
    slurm.run("srun", "-N1", "-w", "n1", "touch", "/tmp/marker", "/dev/shm/marker")
    files = [str(folder / "marker") for folder in (shared, Path("/tmp"), Path("/dev/shm"))]
    seen = slurm.run("srun", "-N1", "-w", "n2", "bash", "-c", f"ls {' '.join(files)} 2>/dev/null; hostname -i").stdout
    assert seen.split()[0] == files[0]
    assert len(seen.split()) == 2 and seen.strip().endswith(".12")


def test_failing_rank_ends_the_job_and_its_error_is_shown(slurm: Cluster, shared: Path):
    begin = time.monotonic()
    job = submit(slurm, shared, "fail", str(shared))
    assert slurm.wait(job, timeout=PATIENCE)["JobState"] == "FAILED"
    assert time.monotonic() - begin < WAIT_S / 2, "the other ranks waited for their time-out"
    end = log(shared, job).partition("the first error of the job:\n")[2]
    assert end.startswith("rank 3 on n2 failed\n")
    assert end.rstrip().endswith("ValueError: planted fault on rank 3")


def test_job_near_its_time_limit_saves_requeues_itself_and_finishes(slurm: Cluster, shared: Path):
    """`--signal=USR1@600` sends this signal ten minutes before the limit; test_jobs.py covers SIGTERM."""
    job = submit(slurm, shared, "count", str(shared), "8")
    wait_for_count(shared, job, 3)
    slurm.run("scancel", "--signal=USR1", job)
    slurm.wait(job, "PENDING", timeout=PATIENCE)
    result = slurm.wait(job, timeout=PATIENCE)
    assert (result["JobState"], result["Restarts"]) == ("COMPLETED", "1"), log(shared, job)
    assert counted(log(shared, job)) == list(range(1, 9)), "a step was lost, repeated, or its log overwritten"
    assert not list(shared.glob("requeue-*"))


def test_preempted_job_comes_back(slurm: Cluster, shared: Path):
    """A job of a partition with a higher priority takes the nodes; Slurm warns with SIGTERM."""
    job = submit(slurm, shared, "count", str(shared), "8")
    wait_for_count(shared, job, 3)
    urgent = slurm.run(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"
    ).stdout.strip()
    assert slurm.wait(urgent, timeout=PATIENCE)["JobState"] == "COMPLETED"
    result = slurm.wait(job, timeout=PATIENCE)
    assert (result["JobState"], result["Restarts"]) == ("COMPLETED", "1"), log(shared, job)
    assert counted(log(shared, job)) == list(range(1, 9)), log(shared, job)


def test_following_a_job_shows_its_log_and_returns_its_status(
    slurm: Cluster, shared: Path, monkeypatch: pytest.MonkeyPatch
):
    from jetrl_megatron.slurm_follow import follow

    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    wrapped = "echo one; sleep 2; echo two; exit 3"
    job = slurm.run("sbatch", "--parsable", "-o", f"{shared}/log_%j_0.out", "--wrap", wrapped).stdout.strip()
    shown = io.StringIO()
    assert follow(job, shared, shown) == 3
    assert shown.getvalue().splitlines() == ["one", "two", f"job {job}: FAILED"]
