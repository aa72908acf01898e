"""First step of a job, on one node: refuse a bad recipe in seconds, make what is missing.

python -m jetrl_megatron.commands.prepare_job RECIPE [--set KEY=VALUE ...]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer


def prepare(recipe: str, overrides: Sequence[str]) -> None:
    """Check recipe, model and layout; warm-start a tiny model or convert a Megatron checkpoint if that is needed.

    Raises:
        ConfigError: with every problem.
    """
    from jetrl_megatron import prepare
    from jetrl_megatron.config import ConfigError

    config = prepare.load_config(recipe, overrides)
    if wrong := node_problems(config.nodes, os.environ):
        raise ConfigError(wrong)
    run = os.environ.get("JETRL_RUN_DIR")
    folder = prepare.model_folder(config, Path(run) if run else None)
    prepare.check_layout(config, folder)
    prepare.check_trainable(folder)


def node_problems(wanted: int, environ: Mapping[str, str]) -> list[str]:
    """A job of another size than the recipe's would start too many ranks on a node, or leave GPUs idle."""
    nodes = environ.get("SLURM_NNODES", "")
    if not nodes or int(nodes) == wanted:
        return []
    return [
        f"parallel.nodes: the recipe runs on {wanted} nodes, this job has {nodes}: submit with --nodes={wanted}, "
        f"or change the layout with --set parallel.nodes={nodes} (and parallel.dp, rollout.replicas, rollout.nodes)"
    ]


def _command(recipe: str, set_: list[str] = typer.Option([], "--set")) -> None:  # noqa: B008
    prepare(recipe, set_)


if __name__ == "__main__":
    from jetrl_megatron import cli

    command = typer.Typer(add_completion=False)
    command.command()(_command)
    sys.exit(cli.call(sys.argv[1:], command))
