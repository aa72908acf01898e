"""`sbatch slurm/convert.sbatch`: a conversion, the same again, and one that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import REPO, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def convert(slurm: Cluster, folder: Path, *args: str) -> tuple[str, str]:
    env = {"JETRL_RUN_DIR": str(folder / "run")}
    command = ["sbatch", "--parsable", "--output", f"{folder}/%j.log", "slurm/convert.sbatch", *args]
    job = slurm.run(*command, env=env, cwd=REPO).stdout.strip()
    return slurm.wait(job, timeout=400)["JobState"], (folder / f"{job}.log").read_text()


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
