"""`jetrl bench step`: where a training step's time goes."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer

PHASES = ("refit", "rollout", "train")


def step(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe.")],
    set_: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override one value.")] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps to run; the first is left out, it holds the engine's start.")] = 6,
) -> None:
    """Run a few training steps and print the share of each phase; the last line is JSON.

    Example: jetrl bench step tiny_cpu_jetrl
    """
    from jetrl_megatron.commands.train import run

    if steps < 2:
        raise typer.BadParameter("at least 2: the first step holds the engine's start and is left out")
    with tempfile.TemporaryDirectory(prefix="jetrl-bench-") as folder:
        output = Path(folder) / "run"
        run(recipe, [*set_, f"train.steps={steps}", f"train.checkpoint_every={steps + 1}"], output, resume=False)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][1:]
    medians = {phase: statistics.median(line[f"{phase}_seconds"] for line in lines) for phase in PHASES}
    total = statistics.median(line["step_seconds"] for line in lines)
    print(f"{'phase':10}{'seconds':>10}{'share':>8}   median of {len(lines)} steps")
    for phase, seconds in medians.items():
        print(f"{phase:10}{seconds:10.3f}{seconds / total:8.1%}")
    print(f"{'step':10}{total:10.3f}")
    tokens = statistics.median(line["rollout_tokens_per_second"] for line in lines)
    print(json.dumps({"recipe": recipe, "step_seconds": total, "rollout_tokens_per_second": tokens, **medians}))
