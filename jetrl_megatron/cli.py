"""The `jetrl` command. Nothing heavy is imported before a subcommand runs, so that `--help` is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jetrl_megatron.commands import (
    bench_convert,
    bench_gpu,
    bench_kernels,
    bench_parity,
    bench_refit,
    bench_step,
    convert,
    verify_checkpoint,
    verify_parity,
)
from jetrl_megatron.config import ConfigError, nearest
from jetrl_megatron.errors import RunError

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

Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one value, e.g. train.steps=3; may be repeated. All: jetrl_megatron/config.py",
    ),
]
Output = Annotated[Path | None, typer.Option(help="Folder of the run; outputs/RECIPE by default.")]


@app.command(short_help="Train a recipe with GRPO, or list the recipes.")
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

    raise typer.Exit(run(recipe, set_, output, resume))


@app.command(short_help="Warm-start a model by supervised training.")
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


@app.command("eval", short_help="pass@1 and pass@k on held-out questions.")
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


@app.command(short_help="Submit a recipe to Slurm through NeMo-Run, or run it here.")
def launch(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe; see jetrl train --list.")],
    set_: Set = [],  # noqa: B006
    executor: Annotated[str, typer.Option(help="slurm or local.")] = "slurm",
    site: Annotated[Path | None, typer.Option(help="Site file; ~/.config/jetrl/site.toml by default.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; PATHS.JOBS/runs/RECIPE-TIME by default, outputs/RECIPE if local."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the sbatch script and stop.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job's log and return its result.")] = False,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Package the last commit despite changes.")
    ] = False,
    gpu: Annotated[str, typer.Option(help="GPU of the cluster, for the memory check.")] = "h100",
) -> None:
    """Submit a recipe to Slurm, or run it here, through NeMo-Run.

    Example: jetrl launch qwen3_8b_base_8k_jetrl --site site.toml --dry-run
    """
    from jetrl_megatron.commands.launch import run

    if executor not in ("slurm", "local"):
        raise ConfigError([f"--executor {executor!r}: {nearest(executor, ('slurm', 'local'))}"])
    raise typer.Exit(
        run(
            recipe,
            set_,
            executor=executor,
            site=site,
            output=output,
            dry_run=dry_run,
            follow=follow,
            allow_dirty=allow_dirty,
            device=gpu,
        )
    )


@app.command(short_help="Memory per GPU and step time of a recipe.")
def estimate(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe.")],
    set_: Set = [],  # noqa: B006
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Spread the recipe over this many nodes.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU whose peak and bandwidth are used.")] = "h100",
) -> None:
    """Memory per GPU and a first-order step time of a recipe, from data-sheet figures: an estimate.

    Example: jetrl estimate qwen3_8b_base_8k_jetrl --nodes 2
    """
    from jetrl_megatron.commands.estimate import run

    run(recipe, set_, nodes, gpu)


@app.command(short_help="One picture of several runs.")
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, each with a metrics.jsonl.")],
    output: Annotated[Path, typer.Option(help="PNG to write.")] = Path("jetrl.png"),
) -> None:
    """Overlay runs in one picture: reward, KL, log-prob difference, times.

    Example: jetrl plot outputs/tiny_cpu_bf16 outputs/tiny_cpu_mixed outputs/tiny_cpu_jetrl --output modes.png
    """
    from jetrl_megatron.commands.plot import run

    run(runs, output)


@app.command(short_help="What works on this machine, and why the rest does not.")
def doctor(
    recipe: Annotated[str, typer.Argument(help="Also check what this recipe needs.")] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Versions, devices, usable backends and why others are not, and the numerics variables in effect.

    Example: jetrl doctor tiny_cpu_jetrl
    """
    from jetrl_megatron.commands.doctor import run

    raise typer.Exit(run(recipe or None, json_))


def _group(name: str, text: str, example: str) -> typer.Typer:
    group = typer.Typer(
        help=f"{text}\n\nExample: {example}",
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.add_typer(group, name=name, short_help=text)
    return group


app.add_typer(convert.app, name="convert", short_help="Checkpoints between Hugging Face, FP8 and Megatron; layouts.")
verify = _group(
    "verify",
    "Prove that two checkpoints, or trainer and engine, agree.",
    "jetrl verify checkpoint Qwen3-8B Qwen3-8B-megatron",
)
verify.command(short_help="Two checkpoints, bitwise, whatever their layouts.")(verify_checkpoint.checkpoint)
verify.command(short_help="Trainer and engine: bytes, then log-probs.")(verify_parity.parity)
bench = _group("bench", "Measure parts of the system.", "jetrl bench step tiny_cpu_jetrl")
for measure, short in (
    (bench_convert.convert, "Speed and memory of a conversion."),
    (bench_step.step, "Share of each phase in a training step."),
    (bench_parity.parity, "Cost of exact parity."),
    (bench_gpu.rollout, "Generated tokens a second."),
    (bench_gpu.train, "Forward, backward and optimizer step."),
    (bench_refit.refit, "Time and bytes of a refit, digests included."),
):
    bench.command(short_help=short)(measure)
bench.command("kernels", short_help="All kernels on a Hopper GPU, beside their peers.")(bench_kernels.bench_kernels)


def main() -> None:
    """Entry point: errors of ours become one line each on standard error and a non-zero exit status."""
    sys.exit(call(sys.argv[1:]))


def call(arguments: list[str], command: typer.Typer = app) -> int:
    """Run the command line (or the one command of a job's step) and return its exit status."""
    try:
        status = command(arguments, standalone_mode=False)
    except KeyboardInterrupt:
        return _report(["interrupted"], 130)
    except Exception as error:
        lines = _user_error(error)
        if lines is None:
            raise
        return _report(lines, 1 if isinstance(error, (OSError, RunError)) else 2)
    if status == 130:  # what Typer makes of Ctrl-C
        return _report(["interrupted"], status)
    return status if isinstance(status, int) else 0


def _user_error(error: Exception) -> list[str] | None:
    """The lines that tell a user what went wrong, or None for a fault of the program's own."""
    # Typer brings a click of its own, whose exceptions are found by what they can do.
    format_message = getattr(error, "format_message", None)
    if format_message:
        return [format_message()]
    problems = getattr(error, "problems", None)
    if problems:
        return [str(p) for p in problems]
    if isinstance(error, (OSError, RunError)):
        return [str(error)]
    return None


def _report(lines: list[str], status: int) -> int:
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
