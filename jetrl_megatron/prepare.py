"""What happens before a world starts: check everything that can be checked, make what is missing."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from jetrl_megatron.config import Config, ConfigError

TINY = "tiny"
METRICS = "metrics.jsonl"
QUESTIONS_FOR_TOKENIZER = 512


def load_config(recipe: str, overrides: Sequence[str]) -> Config:
    """The recipe with its overrides, validated. Raises ConfigError with every problem."""
    from jetrl_megatron.config import apply_overrides
    from jetrl_recipes import registry

    config = apply_overrides(registry.get(recipe), overrides)
    config.validate()
    return config


def check_output(output: Path, resume: bool) -> None:
    """Raises ConfigError if `output` holds a run and `resume` is false, or holds none and `resume` is true."""
    from jetrl_megatron.checkpoint_names import steps

    holds = (output / METRICS).exists() or bool(steps(output))
    if holds and not resume:
        raise ConfigError([f"{output} holds a run already: continue it with --resume, or choose another --output"])
    if output.exists() and not output.is_dir():
        raise ConfigError([f"{output} is a file"])


def check_layout(config: Config, model_dir: Path) -> None:
    """Hold the model against the trainer's and the engine's layout, before anything is allocated.

    Raises:
        ConfigError: with every violation. Tiles that a layout would cut are violations unless `precision.keep_bf16`.
    """
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_conversion.tiles import violations
    from jetrl_megatron.layouts import rollout_layout, trainer_layout

    spec = load_model_spec(model_dir)
    problems = []
    for found in violations(spec, trainer_layout(config), rollout_layout(config)):
        if found.fatal:
            problems.append(str(found))
        elif config.precision.mode != "bf16" and not config.precision.keep_bf16:
            problems.append(
                f"{found.hf_name}: not whole 128x128 tiles in {found.layout}: {found.reason} "
                "(precision.keep_bf16=true keeps it BF16 on both sides)"
            )
    if config.model.max_length > spec.max_positions:
        problems.append(f"model.max_length: {config.model.max_length}, the model has {spec.max_positions} positions")
    if problems:
        raise ConfigError(problems)


def write_run(config: Config, output: Path) -> None:
    """Write the run's config.json, which its ranks read."""
    output.mkdir(parents=True, exist_ok=True)
    # Every node of a job writes the same file.
    part = output / f".config.json.{socket.gethostname()}.{os.getpid()}"
    config.save(part)
    part.rename(output / "config.json")


def cache_folder() -> Path:
    """Where warm-started tiny models are kept: $XDG_CACHE_HOME/jetrl, ~/.cache/jetrl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetrl"


def model_folder(config: Config, log=print) -> Path:
    """The Hugging Face folder that the run starts from; the tiny model is made and warm-started the first time.

    Raises:
        ConfigError: `model.path` is no model folder.
    """
    if config.model.path != TINY:
        folder = Path(config.model.path)
        if not (folder / "config.json").is_file():
            raise ConfigError([f"model.path: {folder} holds no config.json; a Hugging Face model folder is needed"])
        return folder.absolute()
    final = cache_folder() / f"tiny-{_tiny_key(config)}"
    if (final / "config.json").is_file():
        return final
    log(f"making and warm-starting the tiny model (once, kept in {final})")
    warm_start(config, make_random_tiny(config), final)
    return final


def make_random_tiny(config: Config) -> Path:
    """A tiny model with random weights and a tokenizer for the recipe's task, in a fresh temporary folder."""
    import tempfile

    from jetrl_megatron.data import load_task
    from jetrl_megatron.tiny import make_tiny_model

    task = load_task(config.data, config.sft.seed)
    questions = [task.train_item(i).question for i in range(QUESTIONS_FOR_TOKENIZER)]
    return make_tiny_model(Path(tempfile.mkdtemp(prefix="jetrl-tiny-")), config.sft.seed, questions=questions)


def warm_start(config: Config, source: Path, final: Path) -> None:
    """Supervised training from `source` into the Hugging Face folder `final`, in BF16 whatever the recipe's mode.

    All precision modes start from the same weights, so that what differs between their runs is the mode.
    """
    from jetrl_megatron.launcher import launch
    from jetrl_megatron.sft import MODEL

    work = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        task = copy.deepcopy(config)
        task.model.path, task.precision.mode = str(source), "bf16"
        task.optimizer.lr, task.optimizer.warmup_steps = config.sft.lr, 10
        write_run(task, work)
        launch("sft", task, work)
        if not final.exists():  # another process may have made the same one meanwhile
            (work / MODEL).rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _tiny_key(config: Config) -> str:
    """What the warm-started weights depend on."""
    parts = [config.data.name, config.data.options, vars(config.sft), config.model.max_length, config.parallel.tp]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
