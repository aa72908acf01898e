"""The command line: instant help, one line for each error, non-zero exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest

JETRL = [sys.executable, "-m", "jetrl_megatron.cli"]
HEAVY = ("torch", "vllm", "megatron", "transformers", "numpy", "matplotlib", "nemo_run")


def jetrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*JETRL, *arguments], capture_output=True, text=True, timeout=120)


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from jetrl_megatron import cli
assert cli.call(["--help"]) == 0
loaded = [m for m in {HEAVY!r} if m in sys.modules]
assert not loaded, loaded
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("command", ["train", "sft", "eval", "launch", "estimate", "plot", "doctor"])
def test_every_command_explains_itself_with_an_example(command):
    finished = jetrl(command, "--help")
    assert finished.returncode == 0
    assert f"Example: jetrl {command}" in finished.stdout


def test_an_unknown_recipe_names_the_nearest():
    finished = jetrl("train", "tiny_cpu_jetr")
    assert finished.returncode == 2
    assert finished.stderr.strip() == "error: recipe 'tiny_cpu_jetr' does not exist, did you mean 'tiny_cpu_jetrl'?"


def test_all_bad_overrides_are_named_at_once():
    finished = jetrl("train", "tiny_cpu_jetrl", "--set", "trian.steps=3", "--set", "precision.scales=pow3")
    assert finished.returncode == 2
    assert "train.steps" in finished.stderr and "'pow2'" in finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 2


def test_a_step_on_random_weights_needs_a_shape_and_known_recipes():
    finished = jetrl("bench", "step", "tiny_cpu_jetrl", "--layers", "2")
    assert finished.returncode == 2 and "--set model.path=FOLDER" in finished.stderr
    finished = jetrl("bench", "step", "tiny_cpu_jetrl", "--against", "tiny_cpu_bf61")
    assert finished.returncode == 2 and "did you mean 'tiny_cpu_bf16'?" in finished.stderr


def test_a_layout_that_cuts_tiles_is_refused_with_every_tensor_before_anything_is_made(tmp_path):
    import json

    from jetrl_megatron.tiny import TinySizes, tiny_config

    config = tiny_config(TinySizes()) | {"intermediate_size": 384, "head_dim": 64}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    output = tmp_path / "run"
    finished = jetrl("train", "tiny_cpu_jetrl", "--set", f"model.path={tmp_path / 'model'}", "--output", str(output))
    assert finished.returncode == 2
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"):
        assert name in finished.stderr
    assert not output.exists()


def test_a_model_path_that_is_no_model_is_refused(tmp_path):
    finished = jetrl("train", "tiny_cpu_jetrl", "--set", f"model.path={tmp_path}", "--output", str(tmp_path / "out"))
    assert finished.returncode == 2
    assert "config.json" in finished.stderr


def test_eval_of_nothing_known_says_what_it_takes(tmp_path):
    finished = jetrl("eval", "tiny_cpu_jetr")
    assert finished.returncode == 2
    assert "tiny_cpu_jetrl" in finished.stderr
    (tmp_path / ".metadata").touch()
    finished = jetrl("eval", str(tmp_path))
    assert finished.returncode == 2 and "takes its run's folder" in finished.stderr
