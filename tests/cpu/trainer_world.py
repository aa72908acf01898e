"""Run by torchrun: exercises a real trainer at some parallel sizes and writes what it saw as JSON.

python -m torch.distributed.run ... tests/cpu/trainer_world.py MODEL_FOLDER RESULT.json MODE TP PP [sp]
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from jetrl_conversion.model_spec import load_model_spec
from jetrl_megatron import activations, checkpoint, checkpoint_names, parity_search
from jetrl_megatron.batch import Sample, micro_batches
from jetrl_megatron.collective import from_all
from jetrl_megatron.config import Config
from jetrl_megatron.layouts import trainer_layout
from jetrl_megatron.megatron import weights, world
from jetrl_megatron.megatron.model import fp8_layers
from jetrl_megatron.megatron.trainer import NonFiniteError, Trainer
from jetrl_megatron.refit.digests import merge_digests, rank_digests


def samples(vocab: int, count: int = 12) -> list[Sample]:
    rng = random.Random(0)
    made = []
    for i in range(count):
        response = [rng.randrange(vocab) for _ in range(rng.randrange(2, 9))]
        made.append(
            Sample(
                prompt_ids=[rng.randrange(vocab) for _ in range(rng.randrange(3, 20))],
                response_ids=response,
                engine_logp=[-5.5] * len(response),
                policy_version=0,
                group=i // 4,
                finish_reason="stop",
                advantage=rng.uniform(-1, 1),
            )
        )
    return made


def digests(trainer: Trainer) -> dict[str, str]:
    live = {n: p.detach() for n, p in trainer.parameters().items()}
    for name, layer in fp8_layers(trainer.model).items():
        assert layer.qweight is not None
        live[f"{name}.weight"], live[f"{name}.weight_scale_inv"] = layer.qweight.codes, layer.qweight.scale
    found = rank_digests(trainer.spec, trainer_layout(trainer.config), dist.get_rank(), live)
    # As text: JSON numbers would lose the low bits.
    return {name: str(value) for name, value in merge_digests(from_all(found)).items()}


def state(trainer: Trainer) -> list[torch.Tensor]:
    """Weights, masters and moments of this rank, copied."""
    found = [p.detach().clone() for p in trainer.parameters().values()]
    for optimizer in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for group in optimizer.optimizer.param_groups:
            for p in group["params"]:
                found.append(p.detach().clone())
                found += [v.clone() for v in optimizer.optimizer.state.get(p, {}).values()]
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(from_all(len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))))


def full_disk(trainer: Trainer, output: Path) -> list[list[str]]:
    """What every rank says to a disk that has no room for step 2, and to a limit (a quota) that it runs into."""
    errors, per_parameter = [], checkpoint.BYTES_PER_PARAMETER
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for need, limit in ((1 << 50, unlimited[0]), (per_parameter, 100_000)):
        checkpoint.BYTES_PER_PARAMETER = need
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        try:
            checkpoint.save(trainer, output, {"step": 2}, keep_last=1)
        except OSError as error:
            errors.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    checkpoint.BYTES_PER_PARAMETER = per_parameter
    return from_all(errors)


def main(model: Path, result: Path, mode: str, tp: int, pp: int, sp: bool) -> None:
    config = Config()
    config.model.path = str(model)
    config.precision.mode = mode  # type: ignore[assignment]
    config.parallel.tp, config.parallel.pp, config.parallel.sequence_parallel = tp, pp, sp
    config.optimizer.lr = 1e-3
    device = world.initialize(config)
    trainer = Trainer(config, load_model_spec(model), device)
    weights.load_hf(trainer, model)
    seen: dict = {"digests": digests(trainer)}
    weights.save_hf(trainer, result.with_suffix(".hf"), model)

    batch = samples(trainer.spec.vocab_size)
    tokens = sum(len(s.response_ids) for s in batch)
    batches = micro_batches(batch, [list(range(len(batch)))], 0, 4, tp)

    def loss(part, logp, entropy):
        value = -(logp * part.advantages * part.mask).sum() / tokens
        return value, {"loss": value.detach()}

    found = [lp[b.mask].tolist() for lp, b in zip(trainer.logprobs(batches), batches)]
    seen["logprobs"] = next(part for part in reversed(from_all(found)) if part)
    length = int(batches[0].cu_seqlens[1])
    noted = parity_search.trainer_side(trainer, batches[0], 0, length)[0]
    seen["operations"] = [[n, str(noted.get(n))] for n in activations.operations(trainer.spec.num_layers)]
    stats, seen["grad_norm"] = trainer.step(batches, loss)
    losses = from_all(sum(float(s["loss"]) for s in stats))
    seen["loss"] = losses[-1]
    seen["digests_after_step"] = digests(trainer)

    output = result.with_suffix(".run")
    left = output / "checkpoints" / ".step_000001.partial" / "__0_0.distcp"
    if dist.get_rank() == 0:  # what a run leaves that was killed while it saved
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half")
    seen["steps_before"] = checkpoint_names.steps(output)
    dist.barrier()
    checkpoint.save(trainer, output, {"step": 1}, keep_last=1)
    seen["full_disk"] = full_disk(trainer, output)
    seen["folders"] = sorted(p.name for p in (output / "checkpoints").iterdir())
    trainer.step(batches, loss)
    after = state(trainer)
    checkpoint.load(trainer, checkpoint_names.path(output, 1))
    seen["version_after_load"] = trainer.version
    trainer.step(batches, loss)
    seen["resume_equal"] = same(after, state(trainer))

    before = state(trainer)

    def broken(part, logp, entropy):
        return logp.sum() * float("nan"), {"loss": logp.sum().detach()}

    try:
        trainer.step(batches, broken)
    except NonFiniteError as error:
        seen["nan_loss"] = error.names
    seen["state_kept"] = same(before, state(trainer))
    victim = "decoder.layers.0.mlp.linear_fc1.weight"
    with torch.no_grad():
        trainer.parameters()[victim][3, 5] = float("inf")
    try:
        trainer.quantize()
    except NonFiniteError as error:
        seen["inf_weight"] = error.names
    if dist.get_rank() == 0:
        result.write_text(json.dumps(seen))
    dist.barrier()


if __name__ == "__main__":
    arguments = copy.copy(sys.argv)
    main(Path(arguments[1]), Path(arguments[2]), arguments[3], int(arguments[4]), int(arguments[5]), "sp" in arguments)
    os._exit(0)
