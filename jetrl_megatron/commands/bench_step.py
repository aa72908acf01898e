"""`jetrl bench step`: where a training step's time goes, in one recipe or beside another."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

PHASES = ("refit", "rollout", "train")
STILL = "optimizer.lr=1e-30"
"""Every phase runs, and no weight moves: FP32 masters of random weights cannot take up such a step. A learning rate
that moves them on random rewards makes the answers short within a few steps, and in another way in each recipe."""
VARIED = "data.name=reasoning_gym:gcd"
"""Task for random weights: text that happens to contain the short answer gets part of the reward. Where all answers of
a group get the same reward, its gradients are 0, and a GPU multiplies zeros faster."""
SAME_LENGTH = 0.05
"""Largest difference of two recipes' mean answer lengths at which their times are compared."""


def step(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe.")],
    set_: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override one value.")] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured; figures are their medians.")] = 5,
    warmup: Annotated[
        int, typer.Option(min=1, help="Steps before them: the engine's start, kernels compiled for new row counts.")
    ] = 2,
    against: Annotated[str, typer.Option(help="A second recipe, run after it with the same overrides.")] = "",
    layers: Annotated[
        int,
        typer.Option(
            help="Random weights in this many layers of model.path's shape: its config.json is enough. They stay as "
            "they are (learning rate nearly 0), so that answers keep their length; the task is reasoning_gym:gcd."
        ),
    ] = 0,
) -> None:
    """Run a few training steps and print the share of each phase; the last line is JSON.

    Ends with 1 where two recipes' answers differ so much in length that their times cannot be compared.

    Examples:

        jetrl bench step tiny_cpu_jetrl

        jetrl bench step tiny_gpu_jetrl --against tiny_gpu_bf16 --layers 16 --set model.path=models/Qwen3-8B
    """
    from jetrl_megatron.config import ConfigError
    from jetrl_megatron.prepare import load_config

    recipes = [recipe, *([against] if against else [])]
    configs = [load_config(name, set_) for name in recipes]
    if layers < 0 or (layers and not (Path(configs[0].model.path) / "config.json").is_file()):
        raise ConfigError(
            [f"--layers {layers}: needs --set model.path=FOLDER with a config.json, and a positive number"]
        )
    with tempfile.TemporaryDirectory(prefix="jetrl-bench-") as folder:
        if layers:
            model = _random_model(Path(configs[0].model.path), layers, Path(folder) / "model")
            set_ = [VARIED, *set_, f"model.path={model}", STILL]
        results = [_measure(name, set_, warmup, steps, Path(folder) / name) for name in recipes]
    for result in results:
        print(_table(result, warmup))
    compared = not against or _compare(*results)
    print(json.dumps(results))
    if not compared:
        raise typer.Exit(1)


def _measure(recipe: str, overrides: Sequence[str], warmup: int, steps: int, output: Path) -> dict[str, Any]:
    """Medians over `steps` steps after `warmup`, and the figures of every step."""
    from jetrl_megatron.commands.train import run

    # The disk is not what is measured.
    overrides = [*overrides, "train.checkpoint_every=0", f"train.steps={warmup + steps}"]
    if code := run(recipe, overrides, output, resume=False):
        raise OSError(f"{recipe} ended with {code}; what it said is above")
    keys = {phase: f"{phase}_seconds" for phase in PHASES}
    keys |= {key: key for key in ("step_seconds", "rollout_tokens_per_second", "response_length_mean", "grad_norm")}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    every = [{name: line[key] for name, key in keys.items()} for line in lines]
    for line in every:
        sampled = line["rollout_tokens_per_second"] * line["rollout"]
        line["train_tokens_per_second"] = sampled / line["train"]
    medians = {name: statistics.median(line[name] for line in every[warmup:]) for name in every[0]}
    return {"recipe": recipe, **medians, "steps": every}


def _table(result: dict[str, Any], warmup: int) -> str:
    total, every = result["step_seconds"], [f"{line['step_seconds']:.2f}" for line in result["steps"]]
    lines = [f"{result['recipe']:24}{'seconds':>10}{'share':>8}   median of {len(every) - warmup} steps"]
    lines += [f"  {phase:22}{result[phase]:10.3f}{result[phase] / total:8.1%}" for phase in PHASES]
    lines += [
        f"  {'step':22}{total:10.3f}",
        f"  steps {' '.join(every[:warmup])} | {' '.join(every[warmup:])}",
        f"  answers of {result['response_length_mean']:.1f} tokens: sampled {result['rollout_tokens_per_second']:.0f}, "
        f"trained {result['train_tokens_per_second']:.0f} a second",
    ]
    if result["grad_norm"] == 0:
        lines.append("  gradients are 0, and a GPU multiplies zeros faster: more answers a group, or another data.name")
    return "\n".join(lines)


def _compare(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Print ratios of two recipes' times; False, with the reason, where they did not do the same work."""
    short, long = sorted(result["response_length_mean"] for result in (first, second))
    lengths = f"answers of {second['response_length_mean']:.1f} and {first['response_length_mean']:.1f} tokens"
    what = f"{second['recipe']} / {first['recipe']}"
    if long > (1 + SAME_LENGTH) * short:
        print(f"{what}: not compared, {lengths} differ by more than {SAME_LENGTH:.0%}")
        return False
    ratios = ", ".join(f"{phase} {second[phase] / first[phase]:.3f}" for phase in (*PHASES, "step_seconds"))
    print(f"{what}: {ratios} ({lengths})")
    return True


def _random_model(source: Path, layers: int, folder: Path) -> Path:
    """A Hugging Face folder of random weights in `layers` layers of `source`'s shape, and its tokenizer."""
    import shutil

    import torch
    from safetensors.torch import save_file

    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_conversion.safetensors_io import side_files
    from jetrl_megatron.commands.one_rank import largest_layers
    from jetrl_megatron.tiny import make_tiny_tokenizer

    spec = load_model_spec(largest_layers(load_model_spec(source), layers, folder))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.bfloat16)
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return weight.normal_(0.0, shape[-1] ** -0.5, generator=generator).cpu()

    save_file({name: random(name, info.shape) for name, info in spec.tensors().items()}, folder / "model.safetensors")
    if (source / "tokenizer.json").is_file():
        for file in side_files(source):
            shutil.copy(file, folder)
    else:
        make_tiny_tokenizer(folder, vocabulary=spec.vocab_size)
    return folder
