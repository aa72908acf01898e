"""`jetrl train` and `jetrl sft`: check, prepare, start the world."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from jetrl_megatron import checkpoint_names, prepare, signals
from jetrl_megatron.config import Config, ConfigError
from jetrl_megatron.slurm_env import world_from_env


def run(recipe: str, overrides: Sequence[str], output: Path | None, resume: bool) -> int:
    """Train; returns the exit status."""
    config = prepare.load_config(recipe, overrides)
    output = (output or Path("outputs") / recipe).absolute()
    prepare.check_output(output, resume)
    folder = prepare.model_folder(config, output)
    prepare.check_layout(config, folder)
    prepare.check_trainable(folder)
    # All nodes of a job share the folder; node 0 speaks for it.
    with prepare.only_run_in(output) if world_from_env().node_rank == 0 else nullcontext():
        if prepare.finished(config, output):
            print(f"{output}: all {config.train.steps} steps are done already (more: --set train.steps=N)")
            return 0
        config.model.path = str(folder)
        prepare.write_run(config, output)
        from jetrl_megatron.launcher import launch

        lead = world_from_env().node_rank == 0
        if lead:
            print(f"starting {_processes(config)}; engines log to {output}/engine-*.log", flush=True)
        code = launch("train", config, output)
    if code == 0 and lead and (newest := checkpoint_names.latest(output)):
        print(f"done: {newest}; look: jetrl plot {output}, jetrl eval {output}")
    if code == signals.REQUEUE_EXIT_CODE:
        print(f"asked to stop: the state is saved in {output}, --resume continues")
    return code


def _processes(config: Config) -> str:
    ranks, engines = config.parallel.world_size, config.rollout.replicas
    return f"{ranks} trainer rank{'s' * (ranks > 1)} and {engines} engine{'s' * (engines > 1)}"


def run_sft(recipe: str, overrides: Sequence[str], output: Path) -> None:
    """Warm-start the recipe's model into the folder `output`."""
    config = prepare.load_config(recipe, overrides)
    if output.exists():
        raise ConfigError([f"{output} exists; choose another --output"])
    tiny = config.model.path == prepare.TINY
    with prepare.random_tiny(config) if tiny else nullcontext(prepare.model_folder(config)) as source:
        prepare.check_layout(config, source)
        prepare.warm_start(config, source, output.absolute())


def print_recipes() -> None:
    """The table of all recipes: name, model, GPUs, memory, purpose."""
    from jetrl_megatron.commands.estimate import list_text

    print(list_text())
