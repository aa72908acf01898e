"""Engines in other shapes than test_rollout_engine.py: BF16 and tied with a padded vocabulary; two workers; and how an
engine's process begins and ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from rollout_support import Sender, quantized_names, random_weights, trainer_logprobs, write_model

from jetrl_conversion.layout import Layout
from jetrl_kernels.digest import digest
from jetrl_megatron.config import Config
from jetrl_megatron.engine_ops import Rope, attention_isa
from jetrl_megatron.refit.digests import merge_digests, rank_digests
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.types import EngineDied, EngineError, EngineFacts, Sampling

TRAINING = Sampling(temperature=1.0, max_tokens=24, stop_token_ids=(2,))


def small_config(mode: str = "jetrl", tp: int = 1) -> Config:
    config = Config()
    config.precision.mode = mode  # type: ignore[assignment]
    config.rollout.tp = tp
    config.rollout.threads = 1
    config.rollout.memory_gib = 0.25
    return config


@pytest.mark.slow
@pytest.mark.parametrize("mode, tp", [("bf16", 1), ("jetrl", 2)])
def test_trainer_log_probs_follow(tmp_path, mode, tp):
    """One worker: equal to the bit. Two: the FP32 sums of row-parallel layers are added in another order.

    The embedding is tied and its 300 rows are padded to 320 by vLLM.
    """
    spec = write_model(tmp_path / "model", tie_word_embeddings=True, vocab_size=300, intermediate_size=512)
    quantized = quantized_names(spec) if mode == "jetrl" else set()
    weights = random_weights(spec, 4)
    sender = Sender(spec, quantized, Layout("vllm", tp=tp))
    with RolloutEngine(tmp_path / "model", small_config(mode, tp), quantized=quantized, output=tmp_path) as engine:
        digests = engine.refit(sender.message(0, weights))
        prompts = torch.randint(3, 300, (12, 20), generator=torch.Generator().manual_seed(0)).tolist()
        answers = engine.generate(prompts, list(range(12)), TRAINING)
    sender.close()
    assert len(digests) == len(spec.tensors()) + len(quantized)
    if mode == "bf16":
        assert digests == merge_digests([rank_digests(spec, Layout("hf"), 0, weights)])
    assert max(token for a in answers for token in a.token_ids) < 300
    expected = trainer_logprobs(spec, weights, quantized, [a.prompt_ids + a.token_ids for a in answers], 1.0)
    for answer, logp in zip(answers, expected):
        ours, theirs = torch.tensor(answer.logprobs), logp[len(answer.prompt_ids) - 1 :]
        if tp == 1:
            assert torch.equal(ours, theirs)
        else:
            assert (ours - theirs).abs().max() < 1e-3


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why_at_once(tmp_path):
    write_model(tmp_path / "model")
    engine = RolloutEngine(tmp_path / "model", small_config(), quantized=(), output=tmp_path)
    (tmp_path / "model" / "config.json").write_text("{}")
    engine.start()
    with pytest.raises(EngineError, match="model"):
        engine.wait_ready()
    assert not engine.alive


def test_an_engine_that_computes_differently_is_refused(tmp_path):
    """The engine says which attention kernel and rotary table it has; the trainer compares them with its own."""
    spec = write_model(tmp_path / "model")
    engine = RolloutEngine(tmp_path / "model", small_config(), quantized=(), output=tmp_path)
    facts = EngineFacts(
        vllm="0.26.0",
        attention_isa=attention_isa(128),
        attention_block=128,
        rope_digest=digest(Rope.from_hf_config(spec.config).table()),
        sampling_defaults={},
        numerics={},
    )
    assert engine.differences(facts) == []
    other = digest(Rope.from_hf_config({**spec.config, "rope_theta": 1e6}).table())
    found = engine.differences(dataclasses.replace(facts, attention_isa="vec16", rope_digest=other))
    assert [line.split()[0] for line in found] == ["attention_isa", "rope_digest"]


def test_a_wait_that_takes_too_long_ends_the_engine(tmp_path):
    write_model(tmp_path / "model")
    config = small_config()
    config.rollout.start_timeout_s = 1.0
    engine = RolloutEngine(tmp_path / "model", config, quantized=(), output=tmp_path)
    engine.start()
    pid = engine.pid
    assert pid is not None
    with pytest.raises(EngineDied, match="starting took longer than 1 s"):
        engine.wait_ready()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_engine_ends_with_the_process_that_started_it(tmp_path):
    write_model(tmp_path / "model")
    code = (
        "import sys, time; from pathlib import Path; from jetrl_megatron.config import Config\n"
        "from jetrl_megatron.rollout.client import RolloutEngine\n"
        "engine = RolloutEngine(sys.argv[1], Config(), quantized=(), output=Path(sys.argv[2]))\n"
        "engine.start(); print(engine.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "model"), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    engine = int(parent.stdout.readline())  # type: ignore[union-attr]
    os.kill(engine, 0)
    time.sleep(1)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and os.path.exists(f"/proc/{engine}"):
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{engine}")
