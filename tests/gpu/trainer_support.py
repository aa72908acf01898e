"""What the trainer's GPU tests share: a trainer of one rank in this process, batches, a loss, an engine beside it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
DEVICE = "cuda"


def config_of(model: Path, *overrides: str):
    from jetrl_megatron.config import Config, apply_overrides

    common = [
        f"model.path={model}",
        "model.max_length=1024",
        f"train.device={DEVICE}",
        "optimizer.lr=1e-4",
        "rollout.gpu_memory_utilization=0.0",
        "rollout.memory_gib=1.0",
        "rollout.max_num_seqs=32",
        "rollout.max_num_batched_tokens=4096",
        "rollout.start_timeout_s=300",
    ]
    return apply_overrides(Config(), [*common, *overrides])


@contextmanager
def trainer_of(model: Path, *overrides: str) -> Iterator:
    """A trainer with the model's weights; its memory is free again afterwards."""
    from jetrl_megatron.commands import one_rank

    trainer, _ = one_rank.trainer_of(config_of(model, *overrides), training=True)
    try:
        yield trainer
    finally:
        # The caller's name for it lives on, and models hold themselves in cycles.
        vars(trainer).clear()
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def engine_for(trainer, model: Path, output: Path) -> Iterator:
    """(pool of one engine, sender of the trainer's weights to it); nothing has been sent."""
    from jetrl_megatron.layouts import fp8_tensors
    from jetrl_megatron.refit.sender import RefitSender
    from jetrl_megatron.rollout.client import RolloutEngine
    from jetrl_megatron.rollout.pool import EnginePool

    config, spec = trainer.config, trainer.spec
    engine = RolloutEngine(
        model, config, quantized=fp8_tensors(spec, config), output=output, cpu=trainer.device.type == "cpu"
    )
    pool = EnginePool([engine])
    pool.start()
    try:
        sender = RefitSender(trainer, pool)
        yield pool, sender
        sender.close()
    finally:
        pool.close()


def random_samples(count: int, vocabulary: int, seed: int = 0, longest: int = 300) -> list:
    from jetrl_megatron.batch import Sample

    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        length = int(torch.randint(20, longest, (1,), generator=generator))
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        samples.append(
            Sample(prompt_ids=ids[:8], response_ids=ids[8:], engine_logp=[-5.5] * (length - 8), policy_version=0,
                   group=i, finish_reason="stop", advantage=float(i % 3 - 1))
        )  # fmt: skip
    return samples


def batches_of(trainer, samples: list, size: int, multiple: int | None = None) -> list:
    from jetrl_megatron.batch import micro_batches, padding_multiple

    multiple = multiple or padding_multiple(1, trainer.device.type == "cuda")
    made = micro_batches(samples, [list(range(len(samples)))], 0, size, multiple)
    return [batch.to(trainer.device) for batch in made]


def loss(batch, logp, entropy):
    value = -(logp * batch.advantages * batch.mask).sum() / 1000
    return value, {"loss": value.detach()}


def step(trainer, batches: list) -> float:
    """One optimizer step; the loss summed over micro-batches."""
    return sum(float(s["loss"]) for s in trainer.step(batches, loss)[0])
