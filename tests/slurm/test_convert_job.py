"""`sbatch slurm/convert.sbatch`: a conversion, the same again, one that cannot work, and one that is killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import REPO, Cluster
from documented import line_of, sbatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def submit(slurm: Cluster, folder: Path, *args: str) -> str:
    line = line_of("convert.sbatch").partition(" hf-to-fp8")[0]
    command = [*sbatch(line, f"--output={folder}/%j.log"), *args]
    return slurm.run(*command, env={"JETRL_RUN_DIR": str(folder / "run")}, cwd=REPO).stdout.strip()


def convert(slurm: Cluster, folder: Path, *args: str) -> tuple[str, str]:
    job = submit(slurm, folder, *args)
    return slurm.wait(job, timeout=400)["JobState"], (folder / f"{job}.log").read_text()


def test_conversion_killed_half_way_is_done_when_the_job_comes_back(slurm: Cluster, shared: Path):
    from jetrl_conversion.known_models import known_config
    from jetrl_conversion.random_checkpoint import write_random_checkpoint

    # Large enough to be caught at work.
    sizes = {"num_hidden_layers": 8, "vocab_size": 32000}
    write_random_checkpoint(shared / "model", known_config("Qwen3-0.6B") | sizes)
    job = submit(slurm, shared, "hf-to-fp8", str(shared / "model"), str(shared / "fp8"))
    deadline = time.monotonic() + 300
    while not (shared / ".fp8.partial").exists():
        assert time.monotonic() < deadline and not (shared / "fp8").exists()
        time.sleep(0.02)
    slurm.run("scontrol", "requeue", job)
    slurm.wait(job, "PENDING", timeout=100)
    assert not (shared / "fp8").exists() and (shared / ".fp8.partial").exists(), "not killed half-way"
    result = slurm.wait(job, timeout=400)
    assert (result["JobState"], result["Restarts"]) == ("COMPLETED", "1"), (shared / f"{job}.log").read_text()
    assert sorted(f.name for f in shared.iterdir() if f.name.startswith(("fp8", ".fp8"))) == ["fp8"]


def test_conversion_job(slurm: Cluster, shared: Path):
    from jetrl_megatron.tiny import make_tiny_model

    model, fp8 = shared / "model", shared / "fp8"
    make_tiny_model(model, 0)
    state, log = convert(slurm, shared, "hf-to-fp8", str(model), str(fp8))
    assert state == "COMPLETED", log
    assert (fp8 / "config.json").is_file() and (fp8 / "model.safetensors").stat().st_size > 0
    before = {file.name: file.stat().st_mtime_ns for file in fp8.iterdir()}

    state, log = convert(slurm, shared, "hf-to-fp8", str(model), str(fp8))
    assert state == "COMPLETED" and "is there already: nothing to do" in log
    assert {file.name: file.stat().st_mtime_ns for file in fp8.iterdir()} == before

    state, log = convert(slurm, shared, "hf-to-fp8", str(shared / "missing"), str(shared / "other"))
    assert state == "FAILED"
    assert f"error: {shared / 'missing'}: no such folder" in log
    assert not (shared / "other").exists()

    state, log = convert(slurm, shared, "hf-to-fp8", "--scales", "pow2")
    assert state == "FAILED" and "error: usage: sbatch" in log
