"""From FP32 masters to weights: FP8 without BF16 parameters, and stochastic rounding that no sharding changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jetrl_kernels.digest import digest
from jetrl_kernels.master_cast import master_cast
from jetrl_kernels.quant_weight import quant_weight
from jetrl_megatron.megatron.master_weights import rectangles, tensor_id
from jetrl_megatron.tiny import make_tiny_model

SCRIPT = Path(__file__).with_name("masters_world.py")
SIZES = ["tp2", "dp2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), 3)


@pytest.fixture(scope="module")
def seen(model, tmp_path_factory) -> dict:
    result = tmp_path_factory.mktemp("world") / "result.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(SCRIPT), str(model), str(result)], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text()) | {"folder": result.parent}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_fp8_alone_trains_like_fp8_beside_bf16(seen, size):
    found = seen[size]
    assert found["losses"][0] == found["losses"][1]
    assert found["digests"][0] == found["digests"][1]
    plain, bare = found["bf16_bytes"]
    assert bare < plain / 3, "embedding and norms are left"


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_fp8_alone_is_saved_and_resumed_in_full(seen, size):
    found = seen[size]
    assert found["loaded_digests"] == found["digests"][1]
    assert found["resume_equal"]
    saved = load_file(seen["folder"] / f"result.{size}" / "hf" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    q = quant_weight(saved[name])
    assert found["digests"][1][name] == str(digest(q.codes))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_nan_in_a_master_is_named(seen, size):
    assert "decoder.layers.0.mlp.linear_fc1.weight" in seen[size]["nan_named"]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fp8_param", [False, True])
def test_stochastic_rounding_is_that_of_the_whole_tensor(seen, model, size, fp8_param):
    from masters_world import FACTOR, SEED

    found = seen[size][f"stochastic_{fp8_param}"]
    nearest = 0
    for name, weight in load_file(model / "model.safetensors").items():
        master = weight.float().mul_(FACTOR)
        rounded = master_cast(master, "stochastic", seed=SEED, step=1, tensor_id=tensor_id(name))
        stored = quant_weight(rounded).codes if f"{name}_scale_inv" in found else rounded
        assert found[name] == str(digest(stored)), name
        nearest += torch.equal(rounded, master.bfloat16())
    assert nearest == 0


@pytest.mark.slow
def test_recomputed_activations_give_the_same_gradients(seen):
    assert seen["recompute_equal"]


@pytest.mark.parametrize("first, last", [(0, 40), (3, 38), (8, 16), (9, 10), (13, 20), (0, 8)])
def test_a_flat_run_is_cut_into_rectangles(first, last):
    width, top, bottom = 8, 1, 4
    found = list(rectangles(first, last, top, bottom, width))
    covered = [i for start, stop in found for i in range(start, stop)]
    assert covered == [i for i in range(first, last) if top * width <= i < bottom * width]
    for start, stop in found:
        whole_rows = start % width == 0 and stop % width == 0
        assert whole_rows or start // width == (stop - 1) // width
    assert len(found) <= 3
