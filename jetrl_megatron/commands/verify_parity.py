"""`jetrl verify parity`: trainer and engine at the same weights, on the same tokens."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

MODES = ("te", "jetrl", "bf16", "mixed")
"""`te` is mode jetrl with Transformer Engine's linears in the trainer."""
GPU_ONLY = ("te",)


def parity(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder; with a config.json alone, weights are random.")],
    mode: Annotated[list[str], typer.Option(help=f"Modes to compare, of {', '.join(MODES)}; all by default.")] = [],  # noqa: B006
    strict: Annotated[bool, typer.Option("--strict", help="Fail on any difference.")] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Say which layer differs first (engine runs eagerly).")
    ] = False,
    sequences: Annotated[int, typer.Option(help="Sequences.")] = 16,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt, at random.")] = 32,
    new: Annotated[int, typer.Option(help="Tokens that the engine samples after each prompt.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Compare trainer and engine: bytes by digest, then log-probs, teacher-forced prefill and decode apart.

    Example: jetrl verify parity models/Qwen3-0.6B --mode jetrl --strict
    """
    from jetrl_megatron.config import ConfigError, nearest

    if unknown := [m for m in mode if m not in MODES]:
        raise ConfigError([f"--mode {m}: unknown, {nearest(m, MODES)}" for m in unknown])
    results, different = [], False
    for name in mode or _modes_here(device):
        with tempfile.TemporaryDirectory(prefix="jetrl-parity-") as folder:
            settings = {
                "model": str(model.absolute()),
                "mode": name,
                "layers": layers,
                "sequences": sequences,
                "prompt": prompt,
                "new": new,
                "device": device,
                "folder": folder,
            }
            run = subprocess.run(
                [sys.executable, "-m", __name__, json.dumps(settings)], stdout=subprocess.PIPE, text=True
            )
            if run.returncode:
                raise OSError(f"parity in mode {name} failed with exit status {run.returncode}; its log is above")
            result = json.loads(run.stdout.splitlines()[-1])
        results.append(result)
        _print(result)
        different |= any(result[pair]["mismatch_count"] for pair in ("prefill", "decode"))
    print(json.dumps(results))
    if strict and different:
        raise typer.Exit(1)


def _modes_here(device: str) -> list[str]:
    import torch

    gpu = device != "cpu" and torch.cuda.is_available()
    return [m for m in MODES if gpu or m not in GPU_ONLY]


def _print(result: dict) -> None:
    print(f"{result['mode']}: {result['tensors']} tensors equal by digest, {result['tokens']} tokens")
    for pair, said in (("prefill", "trainer - engine, prefill"), ("decode", "trainer - engine, as sampled")):
        numbers = result[pair]
        print(
            f"  {said:30} differ {numbers['mismatch_count']:>8}  max {numbers['max_abs_diff']:.3e}  "
            f"mean |d| {numbers['mean_abs_diff']:.3e}  k1 {numbers['k1']:.3e}  k3 {numbers['k3']:.3e}"
        )
    if "first_layer" in result:
        first = result["first_layer"]
        print("  every layer's output is equal" if first is None else f"  layer {first} is the first to differ")


def compare(trainer: list[float], engine: list[float]) -> dict[str, float]:
    """Counts and distances of two lists of log-probs of the same tokens; k1 and k3 estimate KL(engine || trainer)."""
    deltas = [t - e for t, e in zip(trainer, engine, strict=True)]
    n = len(deltas)
    return {
        "mismatch_count": sum(d != 0 for d in deltas),
        "max_abs_diff": max(map(abs, deltas)),
        "mean_abs_diff": sum(map(abs, deltas)) / n,
        "k1": -sum(deltas) / n,
        "k3": sum(math.expm1(d) - d for d in deltas) / n,
    }


def measure(settings: dict) -> dict:
    """One mode, in a world of one rank with one engine. Digests must agree before anything else is compared."""
    from jetrl_megatron.commands import one_rank
    from jetrl_megatron.config import Config, ModelConfig, ParallelConfig, PrecisionConfig, RolloutConfig, TrainConfig

    mode = settings["mode"]
    length = settings["prompt"] + settings["new"] + 2
    config = Config(
        name=f"parity_{mode}",
        model=ModelConfig(path=settings["model"], max_length=length),
        parallel=ParallelConfig(),
        precision=PrecisionConfig(
            mode="jetrl" if mode == "te" else mode, linear_backend="te" if mode == "te" else "jetrl", keep_bf16=True
        ),
        rollout=RolloutConfig(
            max_response_tokens=settings["new"],
            max_num_seqs=min(256, max(8, settings["sequences"])),
            max_num_batched_tokens=max(512, length),
            enforce_eager=settings["layers"],
            gpu_memory_utilization=0.0,
            memory_gib=2.0,
            start_timeout_s=900.0,
        ),
        train=TrainConfig(device=settings["device"], micro_batch_size=8, timeout_s=900.0),
    )
    import torch

    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_megatron.batch import Sample, micro_batches
    from jetrl_megatron.layouts import fp8_tensors
    from jetrl_megatron.refit.sender import RefitSender
    from jetrl_megatron.rollout.client import RolloutEngine
    from jetrl_megatron.rollout.pool import EnginePool
    from jetrl_megatron.rollout.types import Sampling

    spec, output = load_model_spec(config.model.path), Path(settings["folder"])
    gpu = settings["device"] != "cpu" and torch.cuda.is_available()
    probe = "jetrl_megatron.rollout.probe.ProbeExtension" if settings["layers"] else None
    engine = RolloutEngine(
        config.model.path,
        config,
        quantized=fp8_tensors(spec, config),
        output=output,
        cpu=not gpu,
        worker_extension=probe,
    )
    pool = EnginePool([engine])
    pool.start()
    try:
        trainer, spec = one_rank.trainer_of(config, training=False)
        sender = RefitSender(trainer, pool)
        report = sender.send()
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(spec.vocab_size, (settings["sequences"], settings["prompt"]), generator=generator)
        sampling = Sampling(temperature=1.0, max_tokens=settings["new"], stop_token_ids=())
        answers = pool.generate(prompts.tolist(), list(range(len(prompts))), sampling)
        full = [a.prompt_ids + a.token_ids for a in answers]
        prefill = [logp for a, scores in zip(answers, engine.score(full)) for logp in scores[len(a.prompt_ids) - 1 :]]
        decode = [logp for a in answers for logp in a.logprobs]
        samples = [
            Sample(prompt_ids=a.prompt_ids, response_ids=a.token_ids, engine_logp=a.logprobs, policy_version=0, group=0,
                   finish_reason=a.finish_reason)
            for a in answers
        ]  # fmt: skip
        batches = micro_batches(
            samples, [list(range(len(samples)))], 0, config.train.micro_batch_size, 128 if gpu else 1
        )
        batches = [b.to(trainer.device) for b in batches]
        ours = [float(x) for lp, b in zip(trainer.logprobs(batches), batches) for x in lp[b.mask].tolist()]
        result = {
            "mode": mode,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "tensors": report.tensors,
            "tokens": len(ours),
            "refit_seconds": report.seconds,
            "prefill": compare(ours, prefill),
            "decode": compare(ours, decode),
            "engine_decode_against_prefill": compare(decode, prefill),
        }
        if settings["layers"]:
            result["first_layer"] = _first_layer(trainer, engine, samples[0], 128 if gpu else 1)
        sender.close()
        return result
    finally:
        pool.close()


def _first_layer(trainer, engine, sample, multiple: int) -> int | None:
    """Number of the first layer whose output differs for one sequence; None if all are equal."""
    import torch

    from jetrl_megatron.batch import micro_batches

    tokens = sample.prompt_ids + sample.response_ids
    engine.call_workers("jetrl_record")
    engine.score([tokens])
    theirs = engine.call_workers("jetrl_recorded")[0]
    ours: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: ours.append(output[0][: len(tokens), 0].cpu()))
        for layer in trainer.core.decoder.layers
    ]
    trainer.logprobs([b.to(trainer.device) for b in micro_batches([sample], [[0]], 0, 1, multiple)])
    for hook in hooks:
        hook.remove()
    for number, (our, their) in enumerate(zip(ours, theirs)):
        if not torch.equal(our.view(torch.int16), torch.from_numpy(their[: len(tokens)])):
            return number
    return None


if __name__ == "__main__":
    import os

    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
