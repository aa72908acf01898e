"""Before a world starts: one run a folder, what the run starts from, and nobody left behind by a killed launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from jetrl_conversion import convert
from jetrl_megatron import prepare, signals
from jetrl_megatron.config import ConfigError
from jetrl_megatron.tiny import make_tiny_model

HOLD = """
import sys
from pathlib import Path
from jetrl_megatron import prepare
with prepare.only_run_in(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def tiny(**sizes: object):
    return prepare.load_config("tiny_cpu_jetrl", [f"{key}={value}" for key, value in sizes.items()])


def test_one_run_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    env = os.environ | {"SLURM_JOB_ID": "7"}
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert other.stdout and other.stdout.readline() == "held\n"
    holder = rf"in use by another run \(job 7, \S+ process {other.pid}\)"
    with pytest.raises(ConfigError, match=holder), prepare.only_run_in(tmp_path):
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # the same job, re-queued: its first life is about to end
    begin = time.monotonic()
    other.stdin.close()  # type: ignore[union-attr]
    with prepare.only_run_in(tmp_path):
        assert time.monotonic() - begin < 60
    other.kill()
    other.wait()
    with prepare.only_run_in(tmp_path):
        assert f"process {os.getpid()}" in (tmp_path / ".lock").read_text()


def test_megatron_checkpoint_becomes_a_model_folder_once(tmp_path: Path):
    source, megatron = make_tiny_model(tmp_path / "hf", 0), tmp_path / "megatron"
    convert.hf_to_megatron(source, megatron)
    config = tiny(**{"model.path": megatron})
    with pytest.raises(ConfigError, match="holds a Megatron checkpoint; a Hugging Face model folder is needed"):
        prepare.model_folder(config)
    run, said = tmp_path / "run", []
    # What a process leaves that was killed while it converted.
    (run / ".model.partial").mkdir(parents=True)
    (run / ".model.partial" / "model.safetensors").write_bytes(b"half")
    folder = prepare.model_folder(config, run, said.append)
    made, given = (load_file(f / "model.safetensors") for f in (folder, source))
    assert made.keys() == given.keys() and all(torch.equal(made[name], given[name]) for name in given)
    assert json.loads((folder / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert sorted(f.name for f in run.iterdir()) == ["model"]
    assert prepare.model_folder(config, run, said.append) == folder and len(said) == 1
    prepare.check_layout(config, megatron)


def test_mixture_of_experts_is_refused_before_anything_starts(tmp_path: Path):
    from jetrl_conversion.known_models import known_config

    (tmp_path / "config.json").write_text(json.dumps(known_config("Qwen3-30B-A3B")))
    with pytest.raises(ConfigError, match="is a mixture of experts: converted and estimated, but not trained yet"):
        prepare.check_trainable(tmp_path)


def test_tiny_model_that_the_layout_cannot_hold_is_refused_before_its_warm_start(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = []
    with pytest.raises(ConfigError, match="2 attention heads do not divide by tp = 4"):
        prepare.model_folder(tiny(**{"parallel.tp": 4}), log=said.append)
    assert not said


def test_a_tiny_model_is_warm_started_anew_when_its_data_has_changed(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n')
    first = prepare._tiny_key(tiny(**{"data.name": data}))
    assert first == prepare._tiny_key(tiny(**{"data.name": data, "data.eval_size": 3}))
    data.write_text('{"question": "1+1=", "answer": "two"}\n')
    assert first != prepare._tiny_key(tiny(**{"data.name": data}))


def test_a_warm_start_that_is_stopped_while_its_ranks_start_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("jetrl_megatron.launcher.launch", lambda *_: signals.REQUEUE_EXIT_CODE)
    with pytest.raises(SystemExit) as stopped:
        prepare.warm_start(tiny(), tmp_path / "source", tmp_path / "final")
    assert stopped.value.code == signals.REQUEUE_EXIT_CODE
    assert not list(tmp_path.iterdir())


def test_a_finished_run_is_known(tmp_path: Path):
    config = tiny(**{"train.steps": 4})
    for step in (2, 4):
        assert not prepare.finished(config, tmp_path)
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    assert prepare.finished(config, tmp_path)
    assert not prepare.finished(tiny(**{"train.steps": 5}), tmp_path)


def test_ranks_end_with_a_killed_launcher(tmp_path: Path):
    """A rank that waits for its config (here a pipe that nobody writes to) is gone when its parent is."""
    os.mkfifo(tmp_path / "config.json")
    code = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'jetrl_megatron.worker', *sys.argv[1:]])"
    launcher = subprocess.Popen([sys.executable, "-c", code, "train", str(tmp_path)])
    deadline = time.monotonic() + 120
    pipe = None
    while pipe is None:
        assert time.monotonic() < deadline and launcher.poll() is None
        with contextlib.suppress(OSError):  # nobody reads yet
            pipe = os.open(tmp_path / "config.json", os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.1)
    ranks = psutil.Process(launcher.pid).children()
    assert len(ranks) == 1
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    os.close(pipe)
