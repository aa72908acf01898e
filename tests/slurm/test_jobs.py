"""Real training jobs on a real two-node Slurm: one rank and its files on each node, nothing shared but the folders.

The same steps run four times and must write the same metrics: submitted with `sbatch slurm/train.sbatch` and left
alone, an engine on each node; launched with `jetrl launch`, one engine, and given all the trouble there is: a rank
killed, SIGTERM while a checkpoint is written and again during the export; with the engine on a node of its own; and on
one machine without Slurm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cluster import REPO, Cluster
from documented import line_of, sbatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

RECIPE = "tiny_cpu_jetrl"
SMALL = {
    "parallel.nodes": 2,
    "train.steps": 4,
    "train.checkpoint_every": 2,
    "sft.steps": 5,
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 4,
    "rollout.max_response_tokens": 16,
    "data.eval_size": 4,
    # A machine that is busy with other things takes minutes to start two nodes' worth of processes.
    "train.timeout_s": 1200,
    "rollout.start_timeout_s": 1200,
}
SET = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
SHORT = ("--set", "train.steps=2")
JETRL = str(Path(sys.executable).parent / "jetrl")
UNSTEADY = ("seconds", "per_second", "_gib", "memory", "refit_bytes", "refit_wire_bytes")
"""Metrics with these words depend on the machine's mood, or on where engines are."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """Seen by both nodes, for all tests here: the tiny model is made once."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="jetrl-jobs-", dir="/var/tmp") as name:
        yield Path(name)


def everything(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def metrics(run: Path) -> list[dict]:
    """Those that must not differ."""
    return [{k: v for k, v in line.items() if not any(word in k for word in UNSTEADY)} for line in everything(run)]


def cache(folder: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def logs(folder: Path) -> str:
    files = [f for pattern in ("*.log", "**/*.out") for f in folder.glob(pattern)]
    return "\n".join(f"--- {f.name}\n{f.read_text()[-6000:]}" for f in files)


def job(slurm: Cluster, folder: Path, run: Path, *words: str, **env: str) -> str:
    """Submit the documented line for several nodes, wait for its success, return the log."""
    line = line_of("train.sbatch", "--nodes 4")
    command = [*sbatch(line, f"--output={folder}/%x-%j.log")[:-1], RECIPE, *SET, *words]
    number = slurm.run(*command, env=cache(folder) | env | {"JETRL_RUN_DIR": str(run)}, cwd=REPO).stdout.strip()
    assert slurm.wait(number, timeout=1200)["JobState"] == "COMPLETED", logs(folder)
    return (folder / f"jetrl-{number}.log").read_text()


@pytest.fixture(scope="module")
def uninterrupted(slurm: Cluster, folder: Path) -> list[dict]:
    run = folder / "uninterrupted"
    text = job(slurm, folder, run, "--set", "rollout.replicas=2", JETRL_EXPORT="1")
    assert "environment of this job" in text and "NCCL_DEBUG=WARN" in text
    return metrics(run)


def test_sbatch_trains_on_two_nodes_with_an_engine_on_each(folder: Path, uninterrupted: list[dict]):
    run = folder / "uninterrupted"
    assert [line["step"] for line in uninterrupted] == [1, 2, 3, 4]
    assert all(line["refit_tensors_mismatched"] == 0 and line["refit_tensors"] > 0 for line in uninterrupted)
    assert all((run / f"engine-{replica}.log").is_file() for replica in (0, 1))
    assert not (run / ".agents.json").exists(), "the key of a run ends with it"
    # One trainer rank on each node: half of each node's copy comes from the other.
    first, second = ((line["refit_wire_bytes"], line["refit_bytes"]) for line in everything(run)[:2])
    assert first == second and 0.4 * first[1] < first[0] < 0.6 * first[1]


def test_engines_elsewhere_change_nothing(slurm: Cluster, folder: Path, uninterrupted: list[dict]):
    far, here = folder / "far", folder / "here"
    job(slurm, folder, far, *"--set parallel.nodes=1 --set rollout.nodes=1 --set refit.delta=true".split(), *SHORT)
    assert metrics(far) == uninterrupted[:2]
    assert not (far / ".agents.json").exists()
    command = [JETRL, "train", RECIPE, "--output", str(here), *SET, "--set", "parallel.nodes=1", *SHORT]
    subprocess.run(command, env=os.environ | cache(folder), check=True, capture_output=True, timeout=900)
    assert metrics(here) == uninterrupted[:2]
    copy = everything(here)[0]["refit_bytes"]
    assert [line["refit_wire_bytes"] for line in everything(here)] == [0, 0]
    wire = [line["refit_wire_bytes"] for line in everything(far)]
    assert copy <= wire[0] < 1.2 * copy and wire[1] < wire[0], "only what changed goes again"


def test_finished_job_has_exported_its_last_checkpoint(folder: Path, uninterrupted: list[dict]):
    from jetrl_megatron.commands.export_run import export

    run = folder / "uninterrupted"
    made = sorted((run / "export").iterdir())
    assert [f.name for f in made] == ["step_000004-fp8", "step_000004-hf"]
    assert all((f / "config.json").is_file() for f in made)
    before = [f.stat().st_mtime_ns for f in made]
    assert sorted(export(run)) == made
    assert [f.stat().st_mtime_ns for f in made] == before, "what is complete is left alone"


class Launched:
    """`jetrl launch --follow` at work."""

    def __init__(self, slurm: Cluster, folder: Path, run: Path):
        site = folder / "site.toml"
        site.write_text(
            f'[slurm]\naccount = "any"\npartition = "main"\nexclusive = true\n[paths]\njobs = "{folder}/jobs"\n'
            f'[python]\nbin = "{Path(sys.executable).parent}"\n'
        )
        # What is packaged is the last commit; other changes of a developer's tree are no matter here.
        options = ["--site", str(site), "--output", str(run), "--allow-dirty", "--follow"]
        self.slurm, self.folder, self.run = slurm, folder, run
        self.shown = folder / f"shown-{time.monotonic_ns()}"
        with self.shown.open("w") as out:
            self.process = subprocess.Popen(
                [JETRL, "launch", RECIPE, *SET, *options],
                env=slurm.env | cache(folder) | {"JETRL_EXPORT": "1"},
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.shown.read_text()

    def until(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + 900
        while not happened():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def job(self) -> str:
        # NeMo-Run talks of jobs too.
        self.until(lambda: re.search(r"^job (\d+)$", self.text(), re.M))
        return re.findall(r"^job (\d+)$", self.text(), re.M)[0]

    def stop(self) -> None:
        """SIGTERM to the whole step; returns when the job is back in the queue."""
        self.slurm.run("scancel", "--signal=TERM", self.job())
        self.slurm.wait(self.job(), "PENDING", timeout=600)


def kill_rank(run: Path, rank: int) -> None:
    """SIGKILL, as the kernel's out-of-memory killer does; nodes are namespaces of this machine, as are other tests."""
    for process in psutil.process_iter():
        try:
            if {"jetrl_megatron.worker", str(run)} <= {*process.cmdline()} and process.environ().get("RANK") == str(
                rank
            ):
                process.kill()
        except psutil.Error:
            continue


def test_launched_job_survives_what_clusters_do_and_writes_the_same_metrics(
    slurm: Cluster, folder: Path, uninterrupted: list[dict]
):
    run = folder / "launched"
    first = Launched(slurm, folder, run)
    first.until(lambda: len(metrics(run)) >= 1)
    kill_rank(run, 1)
    assert first.process.wait(300) != 0
    end = first.text().partition("the first error of the job:\n")[2]
    assert end.startswith("rank 1 on n2 was killed by SIGKILL\n"), first.text()

    second = Launched(slurm, folder, run)
    second.until(lambda: list(run.glob("checkpoints/.step_000002*")))
    second.stop()
    assert len(metrics(run)) < 4, "stopped too late to mean anything"
    second.until(lambda: list(run.glob("export")))
    second.stop()
    assert second.process.wait(900) == 0, second.text()
    assert slurm.job(second.job())["Restarts"] == "2"
    assert "step 4/4" in second.text(), "the log of every restart is shown"
    assert metrics(run) == uninterrupted
    assert [f.name for f in sorted((run / "export").iterdir())] == ["step_000004-fp8", "step_000004-hf"]


def test_bad_recipe_never_reaches_the_queue(slurm: Cluster, shared: Path):
    site = shared / "site.toml"
    site.write_text(f'[slurm]\naccount = "any"\npartition = "main"\n[paths]\njobs = "{shared}/jobs"\n')
    before = slurm.run("squeue", "-h", "-t", "all", "-o", "%i").stdout
    for wrong in (
        ["tiny_cpu_jetlr"],
        [RECIPE, "--set", "parallel.nodes=3"],
        ["qwen3_8b_base_8k_jetrl", "--set", "parallel.tp=3"],
    ):
        result = slurm.run(JETRL, "launch", *wrong, "--site", str(site), "--allow-dirty", check=False, cwd=shared)
        assert result.returncode == 2, result.stdout + result.stderr
        assert result.stderr.startswith("error: ")
    assert slurm.run("squeue", "-h", "-t", "all", "-o", "%i").stdout == before
    assert not (shared / "jobs").exists()


def test_what_slurm_says_against_a_job_is_shown(slurm: Cluster, shared: Path):
    site = shared / "site.toml"
    site.write_text(f'[slurm]\naccount = "any"\npartition = "nowhere"\n[paths]\njobs = "{shared}/jobs"\n')
    command = [JETRL, "launch", "tiny_cpu_jetrl", "--site", str(site), "--allow-dirty"]
    result = slurm.run(*command, check=False, cwd=shared)
    assert result.returncode == 2
    assert "error: Slurm refused the job: sbatch: error: invalid partition specified: nowhere" in result.stderr
