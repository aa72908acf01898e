"""One rank of a trainer at exact parity: log-probs of sequences in one batch and alone, as JSON of rank 0.

python exact_ranks.py SETTINGS.json, with torchrun's variables (`ranks.rank`). Settings: `model`, `folder`, `tp`. One
rank alone computes what two ranks would: row-parallel layers and the head by halves (`halves`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from trainer_support import batches_of, config_of, random_samples

from jetrl_conversion.model_spec import load_model_spec
from jetrl_kernels.attention_parts import PART
from jetrl_kernels.fp8_linear import fp8_linear
from jetrl_kernels.fused_logprob import chunk
from jetrl_kernels.quant_weight import QuantizedWeight
from jetrl_megatron.batch import Sample
from jetrl_megatron.megatron import layers, weights, world
from jetrl_megatron.megatron.trainer import Trainer

LONG = PART + 300
"""Tokens of one of the sequences: its keys are cut."""


def halves() -> None:
    """Let one rank add the FP32 sums of two halves of each row-parallel layer, and multiply the head by halves."""

    def row_parallel(self, input, weight, bias=None, **_):
        assert self.qweight is not None and bias is None
        pairs = [x.chunk(2, dim=-1) for x in (input, self.qweight.codes, self.qweight.scale)]
        first, second = (
            fp8_linear(
                x.contiguous(), None, QuantizedWeight(codes.contiguous(), scale.contiguous()),
                policy=self.precision.scales, out_dtype=torch.float32,
            )
            for x, codes, scale in zip(*pairs)
        )  # fmt: skip
        return first + second

    head_logits = chunk.head_logits
    layers.Fp8RowParallelLinear._forward_impl = row_parallel
    chunk.head_logits = lambda x, head: torch.cat([head_logits(x, half) for half in head.chunk(2)], -1)


def logprobs(trainer: Trainer, samples: list[Sample], size: int) -> list[list[float]]:
    """Of the response tokens of each sample, in micro-batches of `size`."""
    found: list[list[float]] = []
    with torch.no_grad():
        for batch, logp in zip(batches := batches_of(trainer, samples, size), trainer.logprobs(batches)):
            counts = [len(s.response_ids) for s in samples[len(found) : len(found) + size]]
            found += [part.tolist() for part in logp[batch.mask].split(counts)]
    return found


def sums_of_two_have_one_order(rows: int) -> bool:
    """Whether NCCL's FP32 sum over two ranks is theirs to the bit."""
    parts = [torch.randn(rows, 512, generator=torch.Generator("cuda").manual_seed(i), device="cuda") for i in range(2)]
    total = parts[dist.get_rank()].clone()
    dist.all_reduce(total)
    return torch.equal(total, parts[0] + parts[1])


def main(settings: dict) -> None:
    tp, model = settings["tp"], Path(settings["model"])
    lengths = [f"model.max_length={LONG + 8}", f"rollout.tp={tp}", f"parallel.tp={tp}", "train.timeout_s=120"]
    config = config_of(model, "precision.parity=exact", *lengths)
    device, spec = world.initialize(config), load_model_spec(model)
    if tp == 1:
        halves()
    trainer = Trainer(config, spec, device)
    weights.load_hf(trainer, model)
    samples = random_samples(7, spec.vocab_size)
    ids = torch.randint(3, spec.vocab_size, (LONG,), generator=torch.Generator().manual_seed(1)).tolist()
    long = Sample(
        prompt_ids=ids[:8], response_ids=ids[8:], engine_logp=[-5.5] * (LONG - 8), policy_version=0, group=9,
        finish_reason="length",
    )  # fmt: skip
    samples.insert(3, long)
    seen = {
        "together": logprobs(trainer, samples, len(samples)),
        "alone": logprobs(trainer, samples[::-1], 1)[::-1],
        "sums": [sums_of_two_have_one_order(rows) for rows in (1, 7, 256, 5000)] if tp == 2 else [],
    }
    if int(os.environ["RANK"]) == 0:
        Path(settings["folder"], "seen.json").write_text(json.dumps(seen))
    dist.barrier()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    os._exit(0)
