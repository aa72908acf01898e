"""The `jetrl` command. Nothing heavy is imported before a subcommand runs, so that `--help` is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from click.exceptions import Exit

from jetrl_megatron.config import ConfigError

app = typer.Typer(
    name="jetrl",
    help="FP8 reinforcement learning in which the policy that samples is the policy that is trained.\n\n"
    "Example: jetrl train tiny_cpu_jetrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. train.steps=3.")]
Output = Annotated[Path | None, typer.Option(help="Folder of the run; outputs/RECIPE by default.")]


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="Name of a recipe; see --list.")] = None,
    set_: Set = [],  # noqa: B006
    output: Output = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List recipes: model, GPUs, memory, purpose.")] = False,
) -> None:
    """Train with GRPO: vLLM samples, Megatron-core updates, both on the same FP8 bytes.

    Example: jetrl train tiny_cpu_jetrl --set train.steps=3 --output /tmp/a
    """
    if list_:
        from jetrl_megatron.commands.train import print_recipes

        return print_recipes()
    if recipe is None:
        raise ConfigError(["which recipe? e.g. jetrl train tiny_cpu_jetrl; jetrl train --list shows all"])
    from jetrl_megatron.commands.train import run

    raise Exit(run(recipe, set_, output, resume))


@app.command()
def sft(
    recipe: Annotated[str, typer.Argument(help="Recipe whose model, task and sft settings are used.")],
    output: Annotated[Path, typer.Option(help="Hugging Face folder to write; must not exist.")],
    set_: Set = [],  # noqa: B006
) -> None:
    """Warm-start a model by supervised training on the task's reference answers.

    Example: jetrl sft tiny_cpu_jetrl --set sft.steps=300 --output /tmp/warm
    """
    from jetrl_megatron.commands.train import run_sft

    run_sft(recipe, set_, output)


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(help="A recipe, a run's folder, or a Hugging Face model folder.")],
    set_: Set = [],  # noqa: B006
    recipe: Annotated[str, typer.Option(help="Recipe that says task and precision, for a model folder.")] = "",
) -> None:
    """pass@1 (and pass@k) on the held-out split, sampled by the same engine as in training.

    Example: jetrl eval outputs/tiny_cpu_jetrl --set data.eval_samples=4
    """
    from jetrl_megatron.commands.evaluate import run

    run(target, set_, recipe)


_COMMANDS = {
    "convert": ("jetrl_megatron.commands.convert", "Convert checkpoints between layouts and formats."),
}


def main() -> None:
    """Entry point: errors of ours become one line each on standard error and a non-zero exit status."""
    sys.exit(call(sys.argv[1:]))


def call(arguments: list[str]) -> int:
    """Run the command line and return its exit status."""
    try:
        status = app(arguments, standalone_mode=False)
    except KeyboardInterrupt:
        return _report(["interrupted"], 130)
    except Exception as error:
        lines = _user_error(error)
        if lines is None:
            raise
        return _report(lines, 2 if isinstance(error, ValueError) else 1)
    return status if isinstance(status, int) else 0


def _user_error(error: Exception) -> list[str] | None:
    """The lines that tell a user what went wrong, or None for a fault of the program's own."""
    import click

    if isinstance(error, click.ClickException):
        return [error.format_message()]
    problems = getattr(error, "problems", None)
    if problems:
        return [str(p) for p in problems]
    launcher = sys.modules.get("jetrl_megatron.launcher")
    if isinstance(error, OSError) or (launcher is not None and isinstance(error, launcher.RunFailed)):
        return [str(error)]
    return None


def _report(lines: list[str], status: int) -> int:
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
