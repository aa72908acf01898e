"""`jetrl doctor`: one look at a machine before anything is started on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jetrl_megatron.commands import doctor_checks as checks
from jetrl_megatron.commands.doctor_checks import Check, Variable
from jetrl_megatron.config import Config

MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "off": "[dim]off[/]", "fail": "[bold red]FAIL[/]"}
PLAIN = {"ok": "ok", "note": "note", "off": "off", "fail": "FAIL"}


def run(recipe: str | None = None, as_json: bool = False) -> int:
    """Examine this machine, and what `recipe` needs of it.

    Returns:
        Exit status: 1 if something that is needed does not work, else 0.

    Raises:
        ConfigError: unknown recipe (with the nearest one).
    """
    config = None
    if recipe is not None:
        from jetrl_megatron.prepare import load_config

        config = load_config(recipe, [])
    found, variables = examine(config)
    healthy = all(check.status != "fail" for check in found)
    if as_json:
        print(json.dumps(report(found, variables, healthy), indent=2))
    else:
        show(found, variables, healthy)
    return 0 if healthy else 1


def examine(config: Config | None) -> tuple[list[Check], list[Variable]]:
    """All checks in the order of the report, and the variables on both sides."""
    found: list[Check] = []
    with _working() as say:
        say("versions")
        found += checks.versions()
        say("devices")
        found += checks.devices()
        import torch

        gpu = torch.cuda.is_available() and (config is None or config.train.device != "cpu")
        say("backends (imports vLLM and Megatron: half a minute)")
        found += checks.backends(config, gpu)
        say("kernels")
        found += checks.kernels(gpu)
        found += checks.refit(config, gpu)
        variables = checks.variables(gpu)
        found += checks.agreement(variables, config)
    return found, variables


def report(found: list[Check], variables: list[Variable], healthy: bool) -> dict[str, Any]:
    """The JSON object that `--json` prints."""
    return {
        "healthy": healthy,
        "checks": [check.to_dict() for check in found],
        "variables": [
            {"name": v.name, "trainer": v.trainer, "engine": v.engine, "job_default": v.job, "agrees": v.agrees}
            for v in variables
        ],
    }


def show(found: list[Check], variables: list[Variable], healthy: bool) -> None:
    """Print the tables: groups of checks, then the variables that are set anywhere."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    marks = MARKS if console.is_terminal else PLAIN
    for group in dict.fromkeys(check.group for check in found):
        table = Table(title=group, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=False)
        table.add_column(min_width=20, no_wrap=True)
        table.add_column(width=4)
        table.add_column(overflow="fold")
        for check in found:
            if check.group == group:
                table.add_row(check.name, marks[check.status], check.detail.replace("[", r"\["))
        console.print(table)
    table = Table(title="variables that change numbers", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in ("name", "trainer", "engine", "in jobs"):
        table.add_column(column, overflow="fold")
    hidden = 0
    for v in variables:
        if v.trainer is None and v.engine is None and v.job is None:
            hidden += 1
            continue
        table.add_row(v.name, *("-" if x is None else x for x in (v.trainer, v.engine, v.job)))
    console.print(table)
    console.print(f"  and {hidden} more listed in slurm/env.sh that are set nowhere")
    if healthy:
        console.print("everything that is needed works")
    else:
        bad = [f"{check.group}/{check.name}" for check in found if check.status == "fail"]
        console.print(f"not usable: {', '.join(bad)}")


@contextmanager
def _working() -> Iterator[Any]:
    """A spinner on standard error, or nothing where that is no terminal."""
    from rich.console import Console

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("doctor") as status:
        yield lambda text: status.update(f"doctor: {text}")
