"""Metrics survive kills and resumes; TensorBoard and the console say the same."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from jetrl_megatron.metrics import METRICS, REQUIRED, TENSORBOARD, MetricsWriter, console_line, read_metrics


def line(step, **values):
    return dict.fromkeys(REQUIRED, 1.0) | {"step": step, "refit_tensors": 28, "refit_tensors_mismatched": 0} | values


def write(folder, steps, total=10, **values):
    with MetricsWriter(folder, total) as writer:
        writer.resume(steps[0] - 1)
        for step in steps:
            writer.log(line(step, **values))


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / TENSORBOARD))
    events.Reload()
    return {e.step: e.value for e in events.Scalars(tag)}


def test_one_object_a_step_and_the_same_in_tensorboard(tmp_path, capsys):
    with MetricsWriter(tmp_path, 3) as writer:
        writer.resume(0)
        for step in (1, 2, 3):
            writer.log(line(step, reward_mean=step / 10))
            assert len(read_metrics(tmp_path)) == step  # on the disk before the next step
    rows = [json.loads(text) for text in (tmp_path / METRICS).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(set(REQUIRED) <= set(row) for row in rows)
    assert scalars(tmp_path, "reward_mean") == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    printed = capsys.readouterr().out.splitlines()
    assert [text.split("  ")[0] for text in printed] == ["step 1/3", "step 2/3", "step 3/3"]
    assert "eta 0:00" in printed[-1] and "━" not in "".join(printed)  # no bar when it is no terminal


def test_resume_cuts_what_the_checkpoint_does_not_cover(tmp_path):
    write(tmp_path, range(1, 8), reward_mean=0.25)
    before = (tmp_path / METRICS).read_text().splitlines()
    write(tmp_path, range(5, 11), reward_mean=0.75)
    after = (tmp_path / METRICS).read_text().splitlines()
    assert after[:4] == before[:4]
    assert [json.loads(x)["step"] for x in after] == list(range(1, 11))
    assert scalars(tmp_path, "reward_mean") == {s: 0.25 if s < 5 else 0.75 for s in range(1, 11)}


def test_a_full_disk_is_named_and_the_run_goes_on_from_its_checkpoint(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = pytest.raises(OSError, match=rf"File too large \(.* are free\): '{tmp_path / METRICS}'")
    with said, MetricsWriter(tmp_path, 3) as writer:
        writer.resume(0)
        writer.log(line(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / METRICS).stat().st_size + 9, limits[1]))
        writer.log(line(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    write(tmp_path, [2, 3])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_resume_without_enough_lines_is_refused(tmp_path):
    write(tmp_path, [1, 2])
    with MetricsWriter(tmp_path, 10) as writer, pytest.raises(ValueError, match="checkpoint is of step 4"):
        writer.resume(4)
    assert len(read_metrics(tmp_path)) == 2


@pytest.mark.parametrize("tail", ['{"step": 3, "rew', "\0" * 40, '{"step"'])
def test_torn_last_line_is_dropped_and_replaced(tmp_path, tail):
    write(tmp_path, [1, 2])
    with (tmp_path / METRICS).open("a") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    write(tmp_path, [3])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_zeroed_last_block_is_dropped_and_a_broken_middle_is_named(tmp_path):
    write(tmp_path, [1, 2])
    good = (tmp_path / METRICS).read_text()
    (tmp_path / METRICS).write_text(good + "\0\0\0\n")
    assert len(read_metrics(tmp_path)) == 2
    (tmp_path / METRICS).write_text("{]\n" + good)
    with pytest.raises(ValueError, match=rf"{METRICS}:1 is not a line of metrics"):
        read_metrics(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "nowhere")


def test_nan_is_null_in_json(tmp_path):
    write(tmp_path, [1], loss=math.nan, grad_norm=math.inf)
    text = (tmp_path / METRICS).read_text()
    assert "NaN" not in text and "Infinity" not in text
    row = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert row["loss"] is None and row["grad_norm"] is None
    assert math.isnan(scalars(tmp_path, "loss")[1])


def test_bad_lines_are_refused_before_anything_is_written(tmp_path):
    with MetricsWriter(tmp_path, 3) as writer:
        writer.resume(0)
        bad = line(1)
        del bad["ess"], bad["loss"]
        with pytest.raises(ValueError, match="lack loss, ess"):
            writer.log(bad)
        with pytest.raises(ValueError, match="step 2 after step 0"):
            writer.log(line(2))
    assert (tmp_path / METRICS).read_text() == ""


def test_eta_and_console_line(tmp_path):
    writer = MetricsWriter(tmp_path, 11)
    assert writer.eta() is None
    writer._times.extend([2.0, 4.0])
    writer._done = 1
    assert writer.eta() == 30.0
    with MetricsWriter(tmp_path / "run", 11) as writer:
        writer.resume(0)
        writer._last -= 1000  # engines start in the first step
        writer.log(line(1))
        assert (writer.eta() or 0) >= 10_000
        writer.log(line(2))
        assert (writer.eta() or 0) < 1000
    text = console_line(line(7, reward_mean=0.5, kl_k3=1e-9, eval_pass_at_1=0.25, loss=1e-5), 40, 3725.0)
    for part in (
        "step  7/40",
        "reward 0.500",
        "kl 1.0e-09",
        "eval 0.250",
        "refit 28/28 equal",
        "loss 1.0e-05",
        "1:02:05",
    ):
        assert part in text
    assert "refit 26/28 equal" in console_line(line(1, refit_tensors_mismatched=2), 1, None)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_metrics import line
from jetrl_megatron.metrics import MetricsWriter
with MetricsWriter(Path(sys.argv[1]), 10**6) as writer:
    writer.resume(0)
    for step in range(1, 10**6):
        writer.log(line(step, reward_mean=float(step)))
"""


def test_sigkill_leaves_whole_lines(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), os.path.dirname(__file__)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        for text in process.stdout:
            if text.split("/")[0].split() == ["step", "20"]:
                break
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    rows = read_metrics(tmp_path)
    assert len(rows) >= 20 and [row["reward_mean"] for row in rows] == [float(i + 1) for i in range(len(rows))]
    # TensorBoard orders event files by the second in their names; no run resumes within the second it started in.
    time.sleep(1.1)
    write(tmp_path, range(11, 13), reward_mean=-1.0)
    assert [row["reward_mean"] for row in read_metrics(tmp_path)][8:] == [9.0, 10.0, -1.0, -1.0]
    assert max(scalars(tmp_path, "reward_mean")) == 12
