"""`jetrl train` as a user runs it: real Megatron ranks, a real vLLM engine, and processes that die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jetrl_conversion import convert
from jetrl_megatron.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JETRL = [sys.executable, "-m", "jetrl_megatron.cli"]
SMALL = (
    "train.steps=4 train.checkpoint_every=2 train.eval_every=4 data.eval_size=4 grpo.prompts_per_step=4 "
    "grpo.group_size=4 rollout.max_response_tokens=8 optimizer.lr=0.001"
).split()
REQUIRED = (
    "step policy_version reward_mean response_length_mean loss grad_norm kl_k1 kl_k3 logprob_abs_diff_mean "
    "logprob_abs_diff_max logprob_mismatch_fraction ess refit_tensors refit_tensors_mismatched refit_bytes "
    "refit_seconds rollout_seconds train_seconds step_seconds rollout_tokens_per_second"
).split()
TIMES = ("seconds", "per_second")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), 5)


def command(model: Path, output: Path, *extra: str, recipe: str = "tiny_cpu_jetrl") -> list[str]:
    overrides = [f"model.path={model}", *SMALL]
    return [*JETRL, "train", recipe, "--output", str(output), *(x for o in overrides for x in ("--set", o)), *extra]


def start(arguments: list[str], log: Path) -> subprocess.Popen:
    return subprocess.Popen(arguments, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)


def lines(output: Path) -> list[dict]:
    file = output / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def without_times(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if not any(t in k for t in TIMES)} for r in records]


def wait_for_step(process: subprocess.Popen, step: int, log: Path) -> None:
    """Until this process (whose log is its own) has printed the step's line."""
    deadline = time.monotonic() + 300
    while f"step {step}/" not in log.read_text():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


def child(process: subprocess.Popen, module: str, rank: int | None = None) -> psutil.Process:
    for found in psutil.Process(process.pid).children(recursive=True):
        try:
            if module in found.cmdline() and (rank is None or found.environ().get("RANK") == str(rank)):
                return found
        except psutil.Error:
            continue
    raise AssertionError(f"no process runs {module}")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Path:
    """A run that nothing disturbs."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    finished = subprocess.run(command(model, output), capture_output=True, text=True, timeout=400)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-3000:]
    return output


def test_every_step_leaves_its_metrics_and_equal_bytes_on_both_sides(whole, tmp_path):
    records = lines(whole)
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    for record in records:
        assert [key for key in REQUIRED if key not in record] == []
        assert record["refit_tensors"] > 0 and record["refit_tensors_mismatched"] == 0
        assert record["policy_version"] == record["step"] - 1
    assert "eval_pass_at_1" in records[-1]
    assert list(whole.glob("**/events.out.tfevents.*"))
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    convert.megatron_to_hf(whole / "checkpoints/step_000004", tmp_path / "trained")
    assert {"config.json", "tokenizer.json"} <= {p.name for p in (tmp_path / "trained").iterdir()}


def test_bf16_training_with_fp8_rollout_is_at_least_ten_times_further_from_its_engine(whole, model, tmp_path):
    output = tmp_path / "mixed"
    arguments = command(model, output, "--set", "train.steps=2", "--set", "train.eval_every=0", recipe="tiny_cpu_mixed")
    subprocess.run(arguments, check=True, capture_output=True, timeout=400)
    for mixed, unified in zip(lines(output), lines(whole)):
        assert unified["logprob_abs_diff_mean"] <= mixed["logprob_abs_diff_mean"] / 10


def test_a_second_run_into_the_same_folder_is_refused(whole, model):
    before = (whole / "metrics.jsonl").read_bytes()
    finished = subprocess.run(command(model, whole), capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert "--resume" in finished.stderr and str(whole) in finished.stderr
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_megatron_checkpoint_and_all_that_can_happen_end_in_the_same_metrics(whole, model, tmp_path):
    """Killed while it starts, a full disk, a killed engine: every step is the same bits as of the run that started from
    the Hugging Face folder and was left alone. (tests/slurm/test_jobs.py kills a rank.)"""
    output, log, megatron = tmp_path / "broken", tmp_path / "log", tmp_path / "megatron"
    convert.hf_to_megatron(model, megatron)
    process = start(command(megatron, output), log)
    try:
        while not list(output.glob(".model.partial")) and not (output / "model").exists():
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

        process = start(command(megatron, output, "--resume"), log)
        wait_for_step(process, 2, log)
        for rank in (0, 1):  # a quota
            child(process, "jetrl_megatron.worker", rank).rlimit(psutil.RLIMIT_FSIZE, (1_000_000, -1))
        assert process.wait(120) == 1
        said = rf"error: trainer rank \d exited with 1: OSError: .* \(needs .* free\): '{output}/checkpoints/step_0"
        assert re.search(said, log.read_text()), log.read_text()[-3000:]
        kept = [p.name for p in (output / "checkpoints").iterdir()]
        assert kept in ([], ["step_000002"]), "complete or gone"

        process = start(command(megatron, output, "--resume"), log)
        wait_for_step(process, 3, log)
        child(process, "jetrl_megatron.rollout.server").send_signal(signal.SIGKILL)
        assert process.wait(300) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert without_times(lines(output)) == without_times(lines(whole))
