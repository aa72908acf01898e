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
    layers: Annotated[bool, typer.Option("--layers", help="Say which layer and operation differ first.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Sample again: other batches, cached prefixes; nothing may change.")
    ] = False,
    heavy: Annotated[bool, typer.Option("--heavy", help="Random weights with heavy tails (Student's t, 3).")] = False,
    sequences: Annotated[int, typer.Option(help="Sequences.")] = 16,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt, at random.")] = 32,
    new: Annotated[int, typer.Option(help="Tokens that the engine samples after each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Compare trainer and engine: bytes by digest, then log-probs, teacher-forced prefill and decode apart.

    Example: jetrl verify parity models/Qwen3-0.6B --mode jetrl --strict
    """
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_megatron.config import ConfigError, nearest

    load_model_spec(model)  # refused here in a line
    if unknown := [m for m in mode if m not in MODES]:
        raise ConfigError([f"--mode {m}: unknown, {nearest(m, MODES)}" for m in unknown])
    results, different = [], False
    for name in mode or _modes_here(device):
        with tempfile.TemporaryDirectory(prefix="jetrl-parity-") as folder:
            settings = {
                "model": str(model.absolute()),
                "mode": name,
                "layers": layers,
                "again": again,
                "heavy": heavy,
                "temperature": temperature,
                "sequences": sequences,
                "prompt": prompt,
                "new": new,
                "device": device,
                "folder": folder,
            }
            run = subprocess.run(
                [sys.executable, "-W", "ignore::SyntaxWarning", "-m", __name__, json.dumps(settings)],
                stdout=subprocess.PIPE,
                text=True,
            )
            if run.returncode:
                raise OSError(f"parity in mode {name} failed with exit status {run.returncode}; its log is above")
            result = json.loads(run.stdout.splitlines()[-1])
        results.append(result)
        _print(result)
        different |= any(result[pair]["mismatch_count"] for pair in ("prefill", "decode", "again") if pair in result)
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
    if "again" in result:
        print(f"  sampled again: {result['again']['mismatch_count']} log-probs changed")
    if "first_difference" in result:
        print(f"  first to differ: {result['first_difference'] or 'nothing'}")


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


def _config(settings: dict):
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_megatron.config import Config, ModelConfig, ParallelConfig, PrecisionConfig, RolloutConfig, TrainConfig

    mode, length = settings["mode"], settings["prompt"] + settings["new"] + 2
    spec = load_model_spec(settings["model"])
    # Everything at once, unless told: keys and values of all layers, BF16, and a block more for each sequence.
    cache = settings["sequences"] * (length + 128) * spec.num_layers * spec.kv_rows * 4
    return Config(
        name=f"parity_{mode}",
        model=ModelConfig(path=settings["model"], max_length=length),
        parallel=ParallelConfig(),
        precision=PrecisionConfig(
            mode="jetrl" if mode == "te" else mode, linear_backend="te" if mode == "te" else "jetrl", keep_bf16=True
        ),
        rollout=RolloutConfig(
            max_response_tokens=settings["new"],
            temperature=settings.get("temperature", 1.0),
            max_num_seqs=min(256, max(8, settings["sequences"])),
            max_num_batched_tokens=max(512, length),
            enforce_eager=settings.get("eager", False),
            gpu_memory_utilization=0.0,
            memory_gib=settings.get("memory_gib") or max(0.25, cache / 2**30),
            start_timeout_s=900.0,
        ),
        train=TrainConfig(device=settings["device"], micro_batch_size=8, timeout_s=900.0),
    )


def measure(settings: dict) -> dict:
    """One mode, in a world of one rank with one engine. Digests must agree before anything else is compared."""
    import torch

    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_megatron.batch import Sample, micro_batches
    from jetrl_megatron.commands import one_rank
    from jetrl_megatron.layouts import fp8_tensors
    from jetrl_megatron.megatron import forward
    from jetrl_megatron.refit.sender import RefitSender
    from jetrl_megatron.rollout.client import RolloutEngine
    from jetrl_megatron.rollout.pool import EnginePool
    from jetrl_megatron.rollout.types import Sampling

    config = _config(settings)
    spec, output = load_model_spec(config.model.path), Path(settings["folder"])
    gpu = settings["device"] != "cpu" and torch.cuda.is_available()
    engine = RolloutEngine(config.model.path, config, quantized=fp8_tensors(spec, config), output=output, cpu=not gpu)
    pool = EnginePool([engine])
    pool.start()
    try:
        trainer, spec = one_rank.trainer_of(config, training=False)
        if settings.get("heavy"):
            heavy_tailed(trainer, config.train.seed)
        sender = RefitSender(trainer, pool)
        report = sender.send()
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(spec.vocab_size, (settings["sequences"], settings["prompt"]), generator=generator)
        sampling = Sampling(temperature=config.rollout.temperature, max_tokens=settings["new"], stop_token_ids=())
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

        def ours(temperature: float) -> list[float]:
            logps = forward.logprobs(trainer.model, batches, temperature=temperature, vocab_size=spec.vocab_size)
            return [float(x) for logp, b in zip(logps, batches) for x in logp[b.mask].tolist()]

        # The engine scores given tokens at temperature 1.
        result = {
            "mode": settings["mode"],
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "tensors": report.tensors,
            "tokens": len(decode),
            "refit_seconds": report.seconds,
            "prefill": compare(ours(1.0), prefill),
            "decode": compare(ours(config.rollout.temperature), decode),
        }
        if config.rollout.temperature == 1.0:
            result["engine_decode_against_prefill"] = compare(decode, prefill)
        if settings.get("again"):
            result["again"] = _again(pool, prompts.tolist(), sampling, answers)
        if settings["layers"]:
            result["first_difference"] = _first_difference(trainer, engine, batches[0], full[0])
        sender.close()
        return result
    finally:
        pool.close()


def heavy_tailed(trainer, seed: int) -> None:
    """Weights from Student's t with 3 degrees of freedom (variance 3), scaled by sqrt(1 / (3 in)); norms 1 + 0.1 t."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer.parameters().items():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            for rows in parameter.split(max(1, (1 << 27) // parameter[0].numel())):
                t, *squares = (torch.randn(rows.shape, device=rows.device) for _ in range(4))
                t /= torch.stack(squares).square_().mean(0).sqrt_()
                rows.copy_(1 + 0.1 * t if parameter.dim() == 1 else t * (3 * parameter.shape[1]) ** -0.5)
    trainer.weights_loaded()


def _again(pool, prompts: list[list[int]], sampling, answers) -> dict[str, int]:
    """Sample the same requests again: backwards, in two parts, prompts from the prefix cache."""
    seeds = list(range(len(prompts)))[::-1]
    half = len(seeds) // 2
    found = [a for part in (seeds[:half], seeds[half:]) if part for a in
             pool.generate([prompts[i] for i in part], part, sampling)][::-1]  # fmt: skip
    pairs = [(x, y) for a, b in zip(answers, found) for x, y in zip(a.logprobs, b.logprobs)]
    return {
        "mismatch_count": sum(x != y for x, y in pairs),
        "cached_tokens": sum(a.cached_tokens for a in found),
        "tokens_changed": sum(x != y for a, b in zip(answers, found) for x, y in zip(a.token_ids, b.token_ids)),
    }


def _first_difference(trainer, engine, batch, tokens: list[int]) -> str | None:
    """The first operation whose result differs for the first sequence of a micro-batch; None if all are equal."""
    from jetrl_megatron import parity_search

    ours = parity_search.trainer_side(trainer, batch, 0, len(tokens))
    return parity_search.compare(ours, parity_search.engine_side(engine, tokens), trainer.spec.num_layers)


if __name__ == "__main__":
    import os

    from jetrl_megatron.worker import quiet

    quiet()
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
