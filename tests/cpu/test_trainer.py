"""A real Megatron trainer on the CPU at several parallel sizes: the same bytes, losses and refusals everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jetrl_megatron.tiny import make_tiny_model

SCRIPT = Path(__file__).with_name("trainer_world.py")
SIZES = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "sp2": (2, 1)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), 3)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    done: dict[str, dict] = {}

    def start(name: str, mode: str = "jetrl") -> dict:
        key = f"{mode}-{name}"
        if key not in done:
            tp, pp = SIZES[name]
            result = folder / f"{key}.json"
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp * pp}"]
            command = [*launcher, str(SCRIPT), str(model), str(result), mode, str(tp), str(pp)]
            command += ["sp"] if name == "sp2" else []
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            finished = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
            assert finished.returncode == 0, finished.stderr[-4000:]
            done[key] = json.loads(result.read_text()) | {"hf": result.with_suffix(".hf")}
        return done[key]

    return start


@pytest.mark.parametrize("size", ["tp2", "pp2", "sp2"])
def test_fp8_bytes_on_the_hugging_face_grid_do_not_depend_on_parallel_sizes(run, size):
    one, many = run("tp1")["digests"], run(size)["digests"]
    assert any(name.endswith("_scale_inv") for name in one)
    assert many == one


@pytest.mark.parametrize("size", ["tp1", "tp2", "pp2"])
def test_loading_and_saving_a_hugging_face_folder_keeps_every_byte(run, model, size):
    source, copy = load_file(model / "model.safetensors"), load_file(run(size)["hf"] / "model.safetensors")
    assert source.keys() == copy.keys()
    for name, tensor in source.items():
        assert torch.equal(tensor, copy[name]), name


@pytest.mark.parametrize("size", ["tp2", "pp2", "sp2"])
def test_log_probs_do_not_depend_on_parallel_sizes_and_gradients_hardly(run, size):
    one, many = run("tp1"), run(size)
    first, second = (torch.tensor([x for part in r["logprobs"] for x in part]) for r in (one, many))
    # Row-parallel layers add K-blocks in the order of one rank, and the log-softmax runs over the whole vocabulary.
    assert torch.equal(first, second)
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
    # The input's gradient of a column-parallel layer is a BF16 sum over ranks, quantized again in the layer below.
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2)


@pytest.mark.parametrize("size", ["tp2", "pp2", "sp2"])
def test_every_operation_gives_the_same_bits_at_all_parallel_sizes(run, size):
    one, many = run("tp1")["operations"], run(size)["operations"]
    assert len(one) == 2 * 17 + 3 and all(digest != "None" for _, digest in one)
    assert many == one


@pytest.mark.parametrize("size", ["tp1", "tp2", "pp2"])
def test_a_resumed_trainer_takes_the_very_step_that_it_would_have_taken(run, size):
    seen = run(size)
    assert seen["version_after_load"] == 1
    assert seen["resume_equal"]


def test_a_checkpoint_that_was_never_finished_does_not_count_and_is_replaced(run):
    seen = run("tp2")
    assert seen["steps_before"] == []
    assert seen["folders"] == ["step_000001"]


def test_a_full_disk_is_said_on_every_rank_and_leaves_the_last_checkpoint_alone(run):
    """Before anything is written, and half-way; that the step before is whole is shown by the test of resuming."""
    seen = run("tp2")
    for before, half_way in seen["full_disk"]:
        folder = r"checkpoints/step_000002'$"
        assert re.fullmatch(
            rf"\[Errno 28\] No space left on device \(needs \d.* GB, \d.* are free\): .*{folder}", before
        )
        assert re.fullmatch(rf"\[Errno 27\] File too large \(needs \d+\.\d MB, \d.* are free\): .*{folder}", half_way)
    assert len(seen["full_disk"]) == 2 and seen["folders"] == ["step_000001"]


@pytest.mark.parametrize("size", ["tp1", "tp2", "pp2"])
def test_a_step_that_is_not_finite_is_not_applied_and_named(run, size):
    seen = run(size)
    assert any("loss" in name for name in seen["nan_loss"])
    assert "decoder.layers.0.mlp.linear_fc1.weight" in seen["nan_loss"]
    assert seen["state_kept"]
    assert seen["inf_weight"] == ["decoder.layers.0.mlp.linear_fc1.weight"]


def test_a_bf16_trainer_computes_what_transformers_computes(run, model):
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(SCRIPT.parent))
    from trainer_world import samples

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ours = torch.tensor([x for part in run("tp1", "bf16")["logprobs"] for x in part])
    theirs = []
    for s in samples(reference.config.vocab_size):
        with torch.no_grad():
            logits = reference(torch.tensor([s.prompt_ids + s.response_ids])).logits[0].log_softmax(-1)
        start = len(s.prompt_ids) - 1
        theirs += [float(logits[start + i, token]) for i, token in enumerate(s.response_ids)]
    # BF16 activations against FP32: 8 bits of mantissa through two layers.
    assert (ours - torch.tensor(theirs)).abs().max() < 0.05
