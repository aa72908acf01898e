"""What a replica serves while its weights change: a version that was compared, or nothing. A real engine, driven by its
agent over a connection as on another node."""

from __future__ import annotations

import dataclasses
import os
import signal
from concurrent.futures import Future

import pytest
import torch
from rollout_support import Sender, quantized_names, random_weights, write_model

from jetrl_megatron.config import Config
from jetrl_megatron.rollout.agent import Agent
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.pool import EnginePool, RefitMismatch
from jetrl_megatron.rollout.remote import Hub, RemoteEngine
from jetrl_megatron.rollout.types import EngineDied, GenerationRefused, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TRAINING = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=(2,))
PROMPTS, SEEDS = [[5, 6, 7], [8, 9]], [0, 1]


def test_a_replica_serves_what_was_compared_or_nothing(tmp_path):
    spec = write_model(tmp_path / "model")
    quantized = quantized_names(spec)
    config = Config()
    config.rollout.threads = 1
    config.rollout.memory_gib = 0.25
    config.rollout.start_timeout_s = 900.0
    sender = Sender(spec, quantized)
    engine = RolloutEngine(
        tmp_path / "model",
        config,
        quantized=quantized,
        output=tmp_path,
        worker_extension="rollout_faults.FaultyWorker",
    )
    hub = Hub("127.0.0.1")
    agent = Agent([engine], lambda: hub.address, 60.0)
    remote = RemoteEngine(0, 1, hub, config)
    pool = EnginePool([remote], hub)
    try:
        weights = [random_weights(spec, seed) for seed in range(3)]
        digests = remote.refit(sender.message(0, weights[0]))
        first = pool.generate(PROMPTS, SEEDS, TRAINING)
        assert [a.version for a in first] == [0, 0]

        # Held back: loaded whole, and still not served before somebody has compared it.
        held = remote.refit(sender.message(1, weights[1]), True)
        assert held != digests
        with pytest.raises(GenerationRefused, match="no complete version"):
            remote.generate(PROMPTS, SEEDS, TRAINING)
        remote.accept()
        second = remote.generate(PROMPTS, SEEDS, TRAINING)
        assert [a.version for a in second] == [1, 1]

        message = sender.message(2, weights[1])
        assert pool.load(message, held) == 0

        # Bytes that are not the trainer's are loaded, named, and never served.
        wrong: Future = Future()
        wrong.set_result(held | {"lm_head.weight": 1})
        with pytest.raises(RefitMismatch, match="lm_head"):
            pool.load(dataclasses.replace(message, version=3), wrong)
        with pytest.raises(GenerationRefused, match="no complete version"):
            remote.generate(PROMPTS, SEEDS, TRAINING)

        # The segment is being overwritten when the engine dies: it cannot be brought to any version, so it is out.
        pool.load(dataclasses.replace(message, version=4), held)
        pool.withdraw()
        sender.segment.bytes[: sender.segment.nbytes // 2] = torch.randint(256, (sender.segment.nbytes // 2,)).byte()
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL"):
            pool.generate(PROMPTS, SEEDS, TRAINING)
        assert pool.serving == []
        # With the next version it is back.
        assert pool.load(sender.message(5, weights[0]), digests) == 0
        last = pool.generate(PROMPTS, SEEDS, TRAINING)
        assert [(a.token_ids, a.version) for a in last] == [(a.token_ids, 5) for a in first]

        # It dies with some tensors of the new version copied: a fresh process gets the whole of it.
        before = engine.pid
        engine.call_workers("die_while_copying", 5)
        assert pool.load(sender.message(6, weights[1]), held) == 0
        assert engine.pid != before
        again = pool.generate(PROMPTS, SEEDS, TRAINING)
        assert [(a.token_ids, a.version) for a in again] == [(a.token_ids, 6) for a in second]

        # The same with a version in chunks, of which the first is nowhere any more: out of rotation, nothing is served.
        for number, message in enumerate(sender.messages(7, weights[2], chunks=2)):
            if number == 0:
                pool.load(message)
                with pytest.raises(GenerationRefused, match="no complete version"):
                    remote.generate(PROMPTS, SEEDS, TRAINING)
                engine.call_workers("die_while_copying", 2)
            else:
                with pytest.raises(EngineDied, match="SIGKILL"):
                    pool.load(message, digests)
        assert pool.serving == []
        with pytest.raises(EngineDied):
            pool.generate(PROMPTS, SEEDS, TRAINING)
    finally:
        pool.close()
        agent.close()
        sender.close()
