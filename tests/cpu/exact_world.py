"""Run by torchrun on two ranks: faults of one bit planted into a real exact run, one after the other.

python -m torch.distributed.run ... tests/cpu/exact_world.py MODEL_FOLDER RESULT.json
"""

from __future__ import annotations

import functools
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.megatron import world
from jetrl_megatron.megatron.model import fp8_layers
from jetrl_megatron.parity import ParityError
from jetrl_megatron.rollout import pool
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.probe import ProbeExtension
from jetrl_megatron.rollout.types import Sampling
from jetrl_megatron.run import Run
from jetrl_recipes import registry


class FaultyProbe(ProbeExtension):
    def flip_bit(self, name: str, at: int) -> None:
        _flip(self.weight_transfer_engine.parameters[name], at)


@torch.no_grad()
def _flip(x: Tensor, at: int) -> None:
    """One unit in the last place of one number: BF16, or an E4M3 code."""
    x.detach().view(torch.uint8).view(-1)[at * x.element_size()] ^= 1


@contextmanager
def flipped(x: Tensor, at: int, here: bool = True):
    if here:
        _flip(x, at)
    yield
    if here:
        _flip(x, at)


@contextmanager
def nudged(module: torch.nn.Module, here: bool):
    """One bit of each row of the module's result."""

    def change(module, inputs, output):
        moved = output.clone()
        for row in moved.detach().flatten(1):
            _flip(row, 0)
        return moved

    hook = module.register_forward_hook(change) if here else None
    yield
    if hook is not None:
        hook.remove()


def faults(run: Run):
    """(operation to be named, context that plants it)"""
    layers, one = run.trainer.core.decoder.layers, dist.get_rank() == 1
    codes = {name: layer.qweight.codes for name, layer in fp8_layers(run.trainer.model).items()}  # type: ignore
    yield "layer 1, post_attention_layernorm", flipped(layers[1].pre_mlp_layernorm.weight, 5)
    yield "layer 0, self_attn.q_norm", flipped(layers[0].self_attention.q_layernorm.weight, 7)
    yield "layer 0, self_attn.o_proj", flipped(codes["decoder.layers.0.self_attention.linear_proj"], 300, one)
    yield "layer 1, mlp.up_proj", flipped(codes["decoder.layers.1.mlp.linear_fc1"][-1], 9, one)
    yield "layer 1, self_attn.attention", nudged(layers[1].self_attention.core_attention, one)
    yield "norm", flipped(run.trainer.core.decoder.final_layernorm.weight, 0)


def strained(engine: RolloutEngine) -> dict:
    """A crowd with a common prefix in a cache too small for it, and each request again, alone."""
    prefix = [3 + i % 200 for i in range(140)]
    prompts = [[*prefix, *range(10 + i, 110 + i)] for i in range(6)]
    sampling = Sampling(temperature=0.8, max_tokens=40, stop_token_ids=())
    crowd = engine.generate(prompts, list(range(6)), sampling)
    alone = [engine.generate([p], [i], sampling)[0] for i, p in reversed(list(enumerate(prompts)))][::-1]
    return {
        "cached": [a.cached_tokens for a in alone],
        "equal": [(a.token_ids, a.logprobs) == (c.token_ids, c.logprobs) for a, c in zip(alone, crowd)],
    }


def attempt(run: Run, samples) -> tuple[str, float]:
    """What the run says to an update: its error's text, or `mismatch fraction`."""
    try:
        update = run.update(samples)
    except ParityError as error:
        return str(error), -1.0
    return "", update["logprob_mismatch_fraction"] + update["logprob_abs_diff_max"]


def main(model: Path, result: Path) -> None:
    config = registry.get("tiny_cpu_exact")
    config.model.path = str(model)
    config.grpo.prompts_per_step, config.grpo.group_size, config.train.steps = 4, 4, 9
    config.rollout.temperature, config.model.max_length = 0.8, 320
    # Twelve blocks of 128 tokens: `strained` needs two or three for each of six requests.
    config.rollout.memory_gib = 12 * 128 * 2048 / 2**30
    pool.RolloutEngine = functools.partial(pool.RolloutEngine, worker_extension="exact_world.FaultyProbe")  # type: ignore
    world.initialize(config)
    seen: dict = {"planted": []}
    with Run(config, result.with_suffix(".run")) as run:
        run.refit()
        samples = run.sample(0)
        for operation, planted in faults(run):
            with planted:
                said, _ = attempt(run, samples)
            seen["planted"].append([operation, said])
        seen["version_after_faults"] = run.trainer.version
        if run.lead:
            seen["strained"] = strained(run.pool.engines[0])
            run.pool.engines[0].call_workers("flip_bit", "model.layers.1.self_attn.k_norm.weight", 3)
        seen["engine"] = attempt(run, run.sample(0))
        if run.lead:
            run.pool.engines[0].call_workers("flip_bit", "model.layers.1.self_attn.k_norm.weight", 3)
        seen["sound"] = attempt(run, samples)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(seen))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)
