"""Trainer and engine taking turns on one GPU: what each gives back, and twenty turns that change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_support import batches_of, engine_for, needs_hopper, random_samples, step, trainer_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400), needs_hopper]

CYCLES = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from jetrl_megatron.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"), 1, hidden=1024, heads=8, kv_heads=2, ffn=4096, layers=4)


@pytest.mark.parametrize("fp8_param", ["false", "true"])
def test_offloading_frees_the_state_and_changes_no_step(model: Path, fp8_param: str) -> None:
    losses = []
    for offload in (False, True):
        with trainer_of(model, f"precision.fp8_param={fp8_param}") as trainer:
            batches = batches_of(trainer, random_samples(8, trainer.spec.vocab_size), 4)
            seen = [step(trainer, batches)]
            if offload:
                parameters = sum(p.numel() for p in trainer.parameters().values())
                before = torch.cuda.memory_allocated()
                trainer.offload()
                freed = before - torch.cuda.memory_allocated()
                assert freed > 0.95 * (4 + 12) * parameters, "gradients, masters and two moments in FP32"
                trainer.restore()
                assert abs(torch.cuda.memory_allocated() - before) < 16 << 20
            seen.append(step(trainer, batches))
            losses.append(seen)
    assert losses[1][0] == losses[0][0]
    assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-3, abs=1e-4)


@pytest.mark.alone
def test_twenty_turns_keep_output_and_memory(model: Path, tmp_path: Path) -> None:
    """Offload, wake and refit, sample, sleep, restore; compiled, with CUDA graphs that stay valid."""
    from jetrl_megatron.rollout.types import Sampling

    sampling = Sampling(temperature=1.0, max_tokens=48, stop_token_ids=())
    prompts = [[7 + i, 11, 13, 17] for i in range(16)]
    answers, free_awake, free_asleep = [], [], []
    with trainer_of(model) as trainer, engine_for(trainer, model, tmp_path) as (pool, sender):
        step(trainer, batches_of(trainer, random_samples(8, trainer.spec.vocab_size), 4))
        for _ in range(CYCLES):
            trainer.offload()
            sender.send()
            found = pool.generate(prompts, list(range(16)), sampling)
            answers.append([(a.token_ids, a.logprobs) for a in found])
            free_awake.append(torch.cuda.mem_get_info()[0])
            pool.sleep()
            trainer.restore()
            torch.cuda.synchronize()
            free_asleep.append(torch.cuda.mem_get_info()[0])
            trainer.version += 1  # the same weights once more
    assert all(a == answers[0] for a in answers)
    for free in (free_awake, free_asleep):
        drift = max(abs(f - free[1]) for f in free[2:])
        assert drift < 200 << 20, f"{drift / 2**20:.0f} MiB after the second turn"
