"""First step of a job, on one node: refuse a bad recipe in seconds, make what is missing.

python -m jetrl_megatron.commands.prepare_job RECIPE [--set KEY=VALUE ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer


def prepare(recipe: str, overrides: Sequence[str]) -> None:
    """Check recipe, model folder and layout; warm-start a tiny model that is not there yet.

    Raises:
        ConfigError: with every problem.
    """
    from jetrl_megatron import prepare

    config = prepare.load_config(recipe, overrides)
    prepare.check_layout(config, prepare.model_folder(config))


def _command(recipe: str, set_: list[str] = typer.Option([], "--set")) -> None:  # noqa: B008
    prepare(recipe, set_)


if __name__ == "__main__":
    from jetrl_megatron import cli

    # Errors are printed as `jetrl` prints its own.
    command = typer.Typer(add_completion=False)
    command.command()(_command)
    cli.app = command
    sys.exit(cli.call(sys.argv[1:]))
