"""Supervised warm start with the same trainer: next-token loss on reference answers."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from rich.progress import track
from transformers import AutoTokenizer

from jetrl_conversion.model_spec import load_model_spec
from jetrl_megatron.batch import Sample, micro_batches, padding_multiple, split_for_ranks
from jetrl_megatron.config import Config
from jetrl_megatron.data import load_task, supervised_example
from jetrl_megatron.megatron import weights, world
from jetrl_megatron.megatron.trainer import Trainer
from jetrl_megatron.prepare import TRAINED


def sft(config: Config, output: Path) -> int:
    """Train `sft.steps` steps on this rank and write `output`/model. Collective; returns 0."""
    source = Path(config.model.path)
    device = world.device_for(config)
    trainer = Trainer(config, load_model_spec(source), device)
    weights.load_hf(trainer, source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    task = load_task(config.data, config.sft.seed)
    first = dist.get_rank() == 0
    shown = config.sft.examples or config.sft.steps * config.sft.batch_size

    @functools.lru_cache(config.sft.examples)
    def example(index: int) -> Sample:
        return _sample(*supervised_example(task, tokenizer, config, index, config.sft.wrong_share))

    for step in track(range(config.sft.steps), "sft", disable=not first or not sys.stdout.isatty()):
        first_item = step * config.sft.batch_size
        samples = [example((first_item + i) % shown) for i in range(config.sft.batch_size)]
        tokens = sum(len(s.response_ids) for s in samples)

        def loss(batch, logp, entropy, tokens=tokens):
            value = -(logp * batch.mask).sum() / tokens
            return value, {"loss": value.detach()}

        dp = parallel_state.get_data_parallel_world_size()
        batches = micro_batches(
            samples,
            split_for_ranks(samples, dp, config.train.micro_batch_size),
            parallel_state.get_data_parallel_rank(),
            config.train.micro_batch_size,
            padding_multiple(config.parallel.tp, device.type == "cuda"),
        )
        stats, grad_norm = trainer.step([b.to(device) for b in batches], loss)
        report = step + 1 == config.sft.steps or (step + 1) % 50 == 0
        if report and stats and parallel_state.get_tensor_model_parallel_rank() == 0:
            value = sum(float(s["loss"]) for s in stats)
            print(f"sft step {step + 1}/{config.sft.steps}: loss {value:.4f} grad_norm {grad_norm:.3f}", flush=True)
    weights.save_hf(trainer, output / TRAINED, source)
    return 0


def _sample(prompt: list[int], answer: list[int]) -> Sample:
    return Sample(
        prompt_ids=prompt,
        response_ids=answer,
        engine_logp=[0.0] * len(answer),
        policy_version=0,
        group=0,
        finish_reason="stop",
    )
