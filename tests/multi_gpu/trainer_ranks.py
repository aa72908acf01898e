"""One rank of a trainer on GPUs: what it computes at some parallel sizes, and refits to an engine, as JSON of rank 0.

python trainer_ranks.py SETTINGS.json, with torchrun's variables (`ranks.rank`). Settings: `model`, `folder`, `sizes`
(overrides of all trainers), `cases` (name -> further overrides), `refit` (the case that an engine follows, or null).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import shared
from trainer_support import config_of, loss, random_samples
from trainer_world import digests, same, state

from jetrl_conversion.model_spec import load_model_spec
from jetrl_kernels.quant_weight import quant_weight
from jetrl_megatron import checkpoint, checkpoint_names
from jetrl_megatron.batch import micro_batches, padding_multiple, split_for_ranks
from jetrl_megatron.collective import from_all
from jetrl_megatron.layouts import fp8_tensors
from jetrl_megatron.megatron import weights, world
from jetrl_megatron.megatron.model import fp8_layers
from jetrl_megatron.megatron.trainer import Trainer
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.sender import RefitSender
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.pool import EnginePool
from jetrl_megatron.rollout.remote import RemoteEngine
from jetrl_megatron.rollout.types import Sampling

COMMON = [
    "train.timeout_s=120",
    "rollout.memory_gib=0.25",
    "rollout.enforce_eager=true",
    "refit.staging_mib=1",
    "refit.timeout_s=60",
]
COUNT, SIZE = 8, 4
"""Sequences of a step, and of a micro-batch."""
WAYS = {"cuda-ipc": 0, "nccl": 1}
"""Node of the last trainer rank; the others and the engine are on node 0."""


class Work:
    """A trainer and its share of one batch."""

    def __init__(self, trainer: Trainer):
        from megatron.core import parallel_state

        self.trainer, parallel = trainer, trainer.config.parallel
        self.samples = random_samples(COUNT, trainer.spec.vocab_size)
        shares, number = split_for_ranks(self.samples, parallel.dp, SIZE), parallel_state.get_data_parallel_rank()
        made = micro_batches(self.samples, shares, number, SIZE, padding_multiple(parallel.tp, True))
        self.mine, self.batches = shares[number], [batch.to(trainer.device) for batch in made]
        self.counts = parallel_state.get_tensor_model_parallel_rank() == 0

    def logprobs(self) -> list[list[float]]:
        """Of every response token, by sequence; ranks that both have a sequence must agree."""
        found: dict[int, list[float]] = {}
        for number, (logp, batch) in enumerate(zip(self.trainer.logprobs(self.batches), self.batches)):
            order = self.mine[number * SIZE : (number + 1) * SIZE]
            parts = logp[batch.mask].split([len(self.samples[i].response_ids) for i in order])
            found |= {i: part.tolist() for i, part in zip(order, parts)}
        merged: dict[int, list[float]] = {}
        for part in from_all(found):
            for i, values in part.items():
                assert merged.setdefault(i, values) == values, f"ranks differ in sequence {i}"
        return [merged[i] for i in range(COUNT)]

    def step(self) -> tuple[float, float]:
        """(loss of all sequences, gradient norm) of one optimizer step."""
        stats, norm = self.trainer.step(self.batches, loss)
        return sum(from_all(sum(float(s["loss"]) for s in stats) if self.counts else 0.0)), norm


def bytes_of_the_weights(trainer: Trainer) -> bool:
    """Whether every FP8 layer's bytes, on all ranks, are those of its BF16 weight."""
    with trainer.bf16_weights(), torch.no_grad():
        equal = True
        for layer in fp8_layers(trainer.model).values():
            fresh, held = quant_weight(layer.weight.detach(), trainer.config.precision.scales), layer.qweight
            assert held is not None
            codes = torch.equal(fresh.codes.view(torch.uint8), held.codes.view(torch.uint8))
            equal = equal and codes and torch.equal(fresh.scale, held.scale)
    return all(from_all(equal))


def whole_state(trainer: Trainer) -> list[torch.Tensor]:
    """As `state`, with the BF16 weights that `precision.fp8_param` does not keep."""
    with trainer.bf16_weights():
        return state(trainer)


def examine(trainer: Trainer, folder: Path) -> dict:
    work = Work(trainer)
    seen: dict = {"digests": digests(trainer), "logprobs": work.logprobs()}
    seen["loss"], seen["grad_norm"] = work.step()
    seen["digests_after_step"] = digests(trainer)
    if trainer.config.precision.linear_backend == "jetrl":
        seen["bytes_of_the_weights"] = bytes_of_the_weights(trainer)
    before = whole_state(trainer)
    checkpoint.save(trainer, folder, {"step": 1}, keep_last=1)
    work.step()
    checkpoint.load(trainer, checkpoint_names.path(folder, 1))
    seen["restored"] = same(before, whole_state(trainer)) and digests(trainer) == seen["digests_after_step"]
    return seen


def compare(work: Work, engine: RolloutEngine | None) -> dict:
    """Log-probs of the engine's prefill against the trainer's; empty on ranks without the engine. Collective."""
    ours = torch.tensor([value for part in work.logprobs() for value in part])
    if engine is None:
        return {}
    scores = engine.score([s.prompt_ids + s.response_ids for s in work.samples])
    theirs = torch.tensor([value for s, part in zip(work.samples, scores) for value in part[-len(s.response_ids) :]])
    return {
        "scored": len(ours),
        "differing": int((ours != theirs).sum()),
        "largest": float((ours - theirs).abs().max()),
    }


def sent(sender: RefitSender) -> int:
    """Bytes of the plan that its receiver does not hold itself."""
    plan, receiver = sender.plan, sender.places.receiver
    return sum(t.nbytes for dst in range(plan.dst.world) for t in plan.receives(dst) if t.src_rank != receiver(dst))


def refits(trainer: Trainer, pool: EnginePool | None) -> dict:
    """Two versions by each way to one engine, which sleeps before the second."""
    work, found, parallel = Work(trainer), {}, trainer.config.parallel
    last = parallel.world_size - 1
    for way, node in WAYS.items():
        if node and parallel.dp > 1:
            continue  # nothing of a copy on another node would be needed
        sender = RefitSender(trainer, pool, Places((*(0,) * last, node), (0,), trainer.config.rollout.tp))
        assert sender.member.ways.of(last, 0).name == way
        reports = []
        for _ in range(2):
            report = dataclasses.asdict(sender.send()) | {"chunks": sender.member.chunks, "sent": sent(sender)}
            engine = None if pool is None else pool.engines[0]
            assert not isinstance(engine, RemoteEngine)
            reports.append(report | compare(work, engine))
            if pool is not None:
                sampling = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=())
                answers = pool.generate([[5, 6, 7]] * 4, list(range(4)), sampling)
                assert {a.version for a in answers} == {trainer.version}
                pool.sleep()
            work.step()
        found[way] = reports
        sender.close()
    return found


def main(settings: dict) -> None:
    model, folder, rank = Path(settings["model"]), Path(settings["folder"]), int(os.environ["RANK"])
    base = [*COMMON, *settings["sizes"]]
    config, spec = config_of(model, *base), load_model_spec(model)
    device, pool, seen = world.initialize(config), None, {}
    with contextlib.ExitStack() as stack:
        if settings["refit"] and rank == 0:
            extension = "shared_worker.SharedWorker" if shared(config.rollout.tp) else None
            quantized = fp8_tensors(spec, config)
            engine = RolloutEngine(
                model, config, quantized=quantized, output=folder, cpu=False, worker_extension=extension
            )
            pool = EnginePool([engine])
            stack.callback(pool.close)
            pool.start()
        for name, overrides in settings["cases"].items():
            print(f"case {name}", flush=True)
            trainer = Trainer(config_of(model, *base, *overrides), spec, device)
            weights.load_hf(trainer, model)
            seen[name] = examine(trainer, folder / name)
            if name == settings["refit"]:
                print("refits", flush=True)
                seen["refits"] = refits(trainer, pool)
            vars(trainer).clear()
            gc.collect()
            torch.cuda.empty_cache()
            if rank == 0:
                (folder / "seen.json").write_text(json.dumps(seen))
        dist.barrier()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    os._exit(0)
