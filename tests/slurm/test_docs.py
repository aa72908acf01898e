"""The `sbatch` lines of the documentation, on a real Slurm; what they train and convert is in the tests beside."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import REPO, Cluster
from documented import LINES, line_of, sbatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_sbatch_lines(slurm: Cluster):
    """Slurm accepts every one: options, script and its `#SBATCH` lines."""
    assert {line.partition("slurm/")[2].split()[0] for line in LINES} == {
        "train.sbatch",
        "convert.sbatch",
        "bench.sbatch",
    }
    for line in LINES:
        slurm.run(*sbatch(line, "--test-only"), cwd=REPO)


def test_bench_job(slurm: Cluster, shared: Path):
    """What needs no GPU is measured instead."""
    line = line_of("bench.sbatch").replace("rollout models/Qwen3-8B", f"convert --gb 0.02 --folder {shared}")
    log = shared / "log"
    env = {"JETRL_RUN_DIR": str(shared / "run")}
    job = slurm.run(*sbatch(line, f"--output={log}"), cwd=REPO, env=env).stdout.strip()
    assert slurm.wait(job, timeout=400)["JobState"] == "COMPLETED", log.read_text()
    assert "peak anonymous memory" in log.read_text().splitlines()[-1]
