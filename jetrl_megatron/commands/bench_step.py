"""`jetrl bench step`: where a training step's time goes, in one recipe or beside another."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

PHASES = ("refit", "rollout", "train")


def step(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe.")],
    set_: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override one value.")] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps to run; the first is left out, it holds the engine's start.")] = 6,
    against: Annotated[str, typer.Option(help="A second recipe, run after it with the same overrides.")] = "",
    layers: Annotated[
        int, typer.Option(help="Random weights in this many layers of model.path's shape: its config.json is enough.")
    ] = 0,
) -> None:
    """Run a few training steps and print the share of each phase; the last line is JSON.

    Examples:
        jetrl bench step tiny_cpu_jetrl

        jetrl bench step tiny_gpu_jetrl --against tiny_gpu_bf16 --layers 12 --set model.path=models/Qwen3-8B
    """
    from jetrl_megatron.config import ConfigError
    from jetrl_megatron.prepare import load_config

    if steps < 2:
        raise typer.BadParameter("at least 2: the first step holds the engine's start and is left out")
    recipes = [recipe, *([against] if against else [])]
    configs = [load_config(name, set_) for name in recipes]
    if layers < 0 or (layers and not (Path(configs[0].model.path) / "config.json").is_file()):
        raise ConfigError(
            [f"--layers {layers}: needs --set model.path=FOLDER with a config.json, and a positive number"]
        )
    with tempfile.TemporaryDirectory(prefix="jetrl-bench-") as folder:
        if layers:
            set_ = [*set_, f"model.path={_random_model(Path(configs[0].model.path), layers, Path(folder) / 'model')}"]
        results = [_measure(name, [*set_, f"train.steps={steps}"], Path(folder) / name) for name in recipes]
    for name, result in zip(recipes, results):
        total = result["step_seconds"]
        print(f"{name:24}{'seconds':>10}{'share':>8}   median of {steps - 1} steps")
        for phase in PHASES:
            print(f"  {phase:22}{result[phase]:10.3f}{result[phase] / total:8.1%}")
        print(f"  {'step':22}{total:10.3f}")
    if against:
        first, second = results
        ratios = {phase: second[phase] / first[phase] for phase in (*PHASES, "step_seconds")}
        print(f"{against} / {recipe}: " + ", ".join(f"{phase} {ratio:.3f}" for phase, ratio in ratios.items()))
    print(json.dumps([{"recipe": name, **result} for name, result in zip(recipes, results)]))


def _measure(recipe: str, overrides: Sequence[str], output: Path) -> dict[str, float]:
    """Medians over all steps but the first."""
    from jetrl_megatron.commands.train import run

    # The disk is not what is measured.
    if code := run(recipe, [*overrides, "train.checkpoint_every=0"], output, resume=False):
        raise OSError(f"{recipe} ended with {code}; what it said is above")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][1:]
    keys = {phase: f"{phase}_seconds" for phase in PHASES}
    keys |= {key: key for key in ("step_seconds", "rollout_tokens_per_second", "response_length_mean")}
    return {name: statistics.median(line[key] for line in lines) for name, key in keys.items()}


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
