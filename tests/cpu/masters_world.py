"""Run by torchrun on two ranks: masters to weights at TP=2 and at DP=2, with and without BF16 parameters.

python -m torch.distributed.run --nproc-per-node=2 ... tests/cpu/masters_world.py MODEL_FOLDER RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from trainer_world import digests, same, samples, state

from jetrl_conversion.model_spec import load_model_spec
from jetrl_megatron import checkpoint, checkpoint_names
from jetrl_megatron.batch import PackedBatch, micro_batches, split_for_ranks
from jetrl_megatron.collective import from_all
from jetrl_megatron.config import Config
from jetrl_megatron.megatron import weights, world
from jetrl_megatron.megatron.trainer import NonFiniteError, Trainer

SEED, FACTOR = 5, 1 + 3e-3


def config_of(tp: int, fp8_param: bool, cast: str) -> Config:
    config = Config()
    config.train.seed, config.optimizer.lr = SEED, 1e-3
    config.parallel.tp, config.parallel.dp = tp, 2 // tp
    config.precision.fp8_param, config.optimizer.master_cast = fp8_param, cast  # type: ignore[assignment]
    return config


def trainer_of(model: Path, config: Config) -> Trainer:
    trainer = Trainer(config, load_model_spec(model), world.device_for(config))
    weights.load_hf(trainer, model)
    return trainer


def bf16_bytes(trainer: Trainer) -> int:
    """Memory behind the parameters, shared storages counted once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in trainer.parameters().values()}
    return sum(storages.values())


def scaled(trainer: Trainer) -> dict[str, str]:
    """Digests after a step that multiplies every master by the same number, whatever the gradients are."""
    optimizers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    for optimizer in optimizers:
        optimizer.optimizer.step = lambda optimizer=optimizer: [
            p.data.mul_(FACTOR) for group in optimizer.optimizer.param_groups for p in group["params"]
        ]
    train(trainer)
    return digests(trainer)


def batches_of(trainer: Trainer) -> list[PackedBatch]:
    batch, parallel = samples(trainer.spec.vocab_size), trainer.config.parallel
    shares = split_for_ranks(batch, parallel.dp, 4)
    return micro_batches(batch, shares, dist.get_rank() % parallel.dp, 4, parallel.tp)


def loss(part, logp, entropy):
    value = -(logp * part.advantages * part.mask).sum() / 100
    return value, {"loss": value.detach()}


def train(trainer: Trainer, steps: int = 1) -> list[float]:
    return [sum(float(s["loss"]) for s in trainer.step(batches_of(trainer), loss)[0]) for _ in range(steps)]


def recomputed(model: Path) -> bool:
    """Whether gradients at TP=2 with sequence parallel are the same bits with activations kept and recomputed."""
    found = []
    for recompute in (False, True):
        config = config_of(2, False, "nearest")
        config.parallel.sequence_parallel, config.model.recompute = True, recompute
        trainer = trainer_of(model, config)
        trainer.model.zero_grad_buffer()
        trainer._run(batches_of(trainer), loss)
        found.append([p.main_grad.clone() for p in trainer.parameters().values()])
    return same(*found) and all(float(g.norm()) > 0 for g in found[0])


def fp8_alone(model: Path, tp: int, output: Path) -> dict:
    """Two steps with BF16 parameters and without, a checkpoint in between, and a NaN."""
    plain, bare = (trainer_of(model, config_of(tp, fp8, "nearest")) for fp8 in (False, True))
    seen: dict = {"bf16_bytes": [bf16_bytes(plain), bf16_bytes(bare)]}
    seen["losses"] = [train(t, 2) for t in (plain, bare)]
    seen["digests"] = [digests(t) for t in (plain, bare)]
    checkpoint.save(bare, output, {"step": 2}, keep_last=1)
    weights.save_hf(bare, output / "hf", model)
    train(bare)
    with bare.bf16_weights():
        after = state(bare)
    checkpoint.load(bare, checkpoint_names.path(output, 2))
    seen["loaded_digests"] = digests(bare)
    train(bare)
    with bare.bf16_weights():
        seen["resume_equal"] = same(after, state(bare))
    victim = bare.parameters()["decoder.layers.0.mlp.linear_fc1.weight"].main_param  # type: ignore[attr-defined]
    if victim is not None and victim.numel():
        victim.data.view(-1)[0] = float("nan")
    try:
        train(bare)
    except NonFiniteError as error:
        seen["nan_named"] = error.names
    return seen


def main(model: Path, result: Path) -> None:
    seen: dict = {}
    for name, tp in (("tp2", 2), ("dp2", 1)):
        world.initialize(config_of(tp, True, "nearest"))
        found = seen[name] = fp8_alone(model, tp, result.with_suffix(f".{name}"))
        for fp8 in (False, True):
            trainer = trainer_of(model, config_of(tp, fp8, "stochastic"))
            found[f"stochastic_{fp8}"] = scaled(trainer)
            before = digests(trainer)
            with trainer.bf16_weights():  # the same rounding a second time
                pass
            assert digests(trainer) == before
        if tp == 2:
            seen["recompute_equal"] = recomputed(model)
        parallel_state.destroy_model_parallel()
    if all(from_all(True)) and dist.get_rank() == 0:
        result.write_text(json.dumps(seen))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)
