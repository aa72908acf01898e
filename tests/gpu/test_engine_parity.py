"""Trainer and engine on one GPU at the same weights: bytes by digest, log-probs of the same tokens, sleep and refit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


def _run(module: str, *arguments: str) -> dict:
    """Last line of a command's output. In a process of its own: a world and an engine, and then a free GPU."""
    command = [sys.executable, "-m", f"jetrl_megatron.commands.{module}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=380)
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from jetrl_megatron.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"), 7, heads=4, kv_heads=2, hidden=512, ffn=1024)


@pytest.mark.parametrize("mode", ["jetrl", "te", "bf16"])
def test_trainer_equals_engine(mode: str, model: Path, tmp_path: Path) -> None:
    settings = {
        "model": str(model), "mode": mode, "layers": False, "sequences": 32, "prompt": 32, "new": 64, "device": "cuda",
        "folder": str(tmp_path),
    }  # fmt: skip
    result = _run("verify_parity", json.dumps(settings))  # compares digests before anything else
    assert result["tokens"] == 32 * 64
    # The engine computes a token alone, in a batch, in prefill and in decode to the same bits.
    assert result["engine_decode_against_prefill"]["mismatch_count"] == 0
    assert result["decode"]["mismatch_count"] == 0


@pytest.mark.alone
def test_refits_and_sleep_keep_the_output(model: Path) -> None:
    result = _run("bench_refit_gpu", "ours", json.dumps({"model": str(model), "rounds": 3, "cycles": 20}))
    assert result["output_unchanged"]
    assert result["free_bytes_drift"] >= -(64 << 20)


def test_refit_through_a_buffer_in_chunks(model: Path) -> None:
    """What comes from another node lands on the GPU a chunk at a time; here trainer and receiver are one process."""
    result = _run("bench_refit_gpu", "ours", json.dumps({"model": str(model), "rounds": 2, "cycles": 2, "landing": 1}))
    assert result["chunks"] > 1
    assert result["output_unchanged"]
