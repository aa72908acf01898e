"""Run by torchrun on one GPU: one bit of an operation's result, planted into an exact run whose engine sleeps by then.

python -m torch.distributed.run ... tests/gpu/exact_fault.py MODEL_FOLDER RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from jetrl_megatron.config import DataConfig
from jetrl_megatron.megatron import world
from jetrl_megatron.parity import ParityError
from jetrl_megatron.run import Run
from jetrl_recipes import registry


def flip(module, inputs, output):
    """The last bit of one number in each row."""
    moved = output.clone()
    moved.detach().view(torch.int16)[:, 3] ^= 1
    return moved


def main(model: Path, result: Path) -> None:
    questions = result.with_suffix(".jsonl")
    questions.write_text(
        "".join(json.dumps({"question": f"{a} + 2 =", "answer": str(a + 2)}) + "\n" for a in range(64))
    )
    config = registry.get("tiny_gpu_exact")
    config.model.path, config.model.max_length = str(model), 128
    config.rollout.max_response_tokens, config.data = 32, DataConfig(name=str(questions), eval_size=4)
    config.grpo.prompts_per_step, config.grpo.group_size = 4, 4
    world.initialize(config)
    seen: dict = {}
    with Run(config, result.with_suffix(".run")) as run:
        run.refit()
        samples = run.sample(0)
        seen["mismatched"] = run.update(samples)["logprob_mismatch_fraction"]
        run.refit()
        samples = run.sample(1)
        run.trainer.core.decoder.layers[1].self_attention.core_attention.register_forward_hook(flip)
        try:
            run.update(samples)
        except ParityError as error:
            seen["said"] = str(error)
    result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)
