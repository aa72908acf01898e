"""What happens before a world starts: check everything that can be checked, make what is missing."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jetrl_conversion.disk import writing
from jetrl_megatron import signals
from jetrl_megatron.config import Config, ConfigError

TINY = "tiny"
METRICS = "metrics.jsonl"
TRAINED = "model"
"""Folder of a supervised run's output that holds the Hugging Face model."""
MEGATRON = ".metadata"
"""The file that every torch distributed checkpoint has."""
LOCK_WAIT_S = 120
QUESTIONS_FOR_TOKENIZER = 512


def load_config(recipe: str, overrides: Sequence[str]) -> Config:
    """The recipe with its overrides, validated. Raises ConfigError with every problem."""
    from jetrl_megatron.config import apply_overrides
    from jetrl_recipes import registry

    config = apply_overrides(registry.get(recipe), overrides)
    config.validate()
    return config


def check_output(output: Path, resume: bool) -> None:
    """Raises ConfigError if `output` holds a run and `resume` is false. With `resume` an empty one is no error."""
    from jetrl_megatron.checkpoint_names import steps

    holds = (output / METRICS).exists() or bool(steps(output))
    if holds and not resume:
        raise ConfigError([f"{output} holds a run already: continue it with --resume, or choose another --output"])
    if output.exists() and not output.is_dir():
        raise ConfigError([f"{output} is a file"])


def finished(config: Config, output: Path) -> bool:
    """Whether the newest checkpoint in `output` is that of the last step."""
    from jetrl_megatron.checkpoint_names import steps

    return steps(output)[-1:] >= [config.train.steps]


@contextlib.contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Keep other processes from training in `output` during the block; the kernel lets go when this process ends.

    The processes of a re-queued job may be a moment in ending on the other node: they are waited for.

    Raises:
        ConfigError: another process is at work there; says which.
    """
    me = f"{socket.gethostname()}, process {os.getpid()}"
    job = os.environ.get("SLURM_JOB_ID")
    job = f"job {job}, " if job else ""
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("a+") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip()
                if not (job and holder.startswith(job)) or time.monotonic() > deadline:
                    raise ConfigError([f"{output} is in use by another run ({holder})"]) from None
                time.sleep(1)
            except OSError:  # a file system without locks
                break
        with writing(output):
            file.truncate(0)
            file.write(job + me + "\n")
            file.flush()
        yield


def check_layout(config: Config, model_dir: Path) -> None:
    """Hold the model against the trainer's and the engine's layout, before anything is allocated.

    Raises:
        ConfigError: with every violation. Tiles that a layout would cut are violations unless `precision.keep_bf16`.
    """
    from jetrl_megatron.memory import check

    here = copy.deepcopy(config)
    here.model.path = str(model_dir)
    check(here, None)


def check_trainable(model_dir: Path) -> None:
    """Raises ConfigError for a model that can be converted and sampled from, but not trained yet."""
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_megatron.memory import training_problems

    if found := training_problems(load_model_spec(model_dir)):
        raise ConfigError(found)


def write_run(config: Config, output: Path) -> None:
    """Write the run's config.json, which its ranks read."""
    output.mkdir(parents=True, exist_ok=True)
    # Every node of a job writes the same file.
    part = output / f".config.json.{socket.gethostname()}.{os.getpid()}"
    with writing(output / "config.json"):
        config.save(part)
    part.rename(output / "config.json")


def cache_folder() -> Path:
    """Where warm-started tiny models are kept: $XDG_CACHE_HOME/jetrl, ~/.cache/jetrl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetrl"


def model_folder(config: Config, output: Path | None = None, log=print) -> Path:
    """The Hugging Face folder that the run starts from.

    Every trainer rank reads its slices of it and engines load it, so nothing is converted where there is one. A
    Megatron checkpoint is converted, once, into `output`/model. The tiny model is made and warm-started the first time.

    Raises:
        ConfigError: `model.path` is no model, or the layout cannot hold the tiny one.
    """
    if config.model.path != TINY:
        folder = Path(config.model.path)
        if (folder / MEGATRON).is_file() and output:
            return _from_megatron(folder, output.absolute() / "model", log)
        if not (folder / "config.json").is_file():
            what = "a Megatron checkpoint" if (folder / MEGATRON).is_file() else "no config.json"
            how = f"such as `hf download ORG/{folder.name} --local-dir {folder}` makes; or --set model.path=FOLDER"
            raise ConfigError([f"model.path: {folder} holds {what}; a Hugging Face model folder is needed, {how}"])
        return folder.absolute()
    final = cache_folder() / f"tiny-{_tiny_key(config)}"
    if (final / "config.json").is_file():
        return final
    with random_tiny(config) as source:
        check_layout(config, source)
        log(f"warm-starting the tiny model by supervised training (once, a minute or two, kept in {final})")
        warm_start(config, source, final)
    return final


def _from_megatron(checkpoint: Path, folder: Path, log) -> Path:
    """`folder` appears when it is complete: a run that was killed meanwhile converts again."""
    from jetrl_conversion.convert import megatron_to_hf

    if not folder.exists():
        log(f"converting the Megatron checkpoint {checkpoint} (once, kept in {folder})")
        megatron_to_hf(checkpoint, folder)
    return folder


@contextlib.contextmanager
def random_tiny(config: Config) -> Iterator[Path]:
    """A tiny model with random weights and a tokenizer for the recipe's task, gone after the block."""
    from jetrl_megatron.data import load_task
    from jetrl_megatron.tiny import make_tiny_model

    task = load_task(config.data, config.sft.seed)
    questions = [task.train_item(i).question for i in range(QUESTIONS_FOR_TOKENIZER)]
    with tempfile.TemporaryDirectory(prefix="jetrl-tiny-") as folder:
        yield make_tiny_model(Path(folder), config.sft.seed, questions=questions)


def warm_start(config: Config, source: Path, final: Path) -> None:
    """Supervised training from `source` into the Hugging Face folder `final`, in BF16 whatever the recipe's mode.

    All precision modes start from the same weights, so that what differs between their runs is the mode.

    Raises:
        SystemExit: asked to stop meanwhile; the model is finished first, it takes minutes and is kept.
    """
    from jetrl_megatron.launcher import launch

    work = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        task = copy.deepcopy(config)
        task.model.path, task.precision.mode = str(source), "bf16"
        task.optimizer.lr, task.optimizer.warmup_steps = config.sft.lr, 10
        write_run(task, work)
        stopped = launch("sft", task, work)  # while its ranks were starting: there is no model
        if not stopped and not final.exists():  # another process may have made the same one meanwhile
            (work / TRAINED).rename(final)
        if stopped or signals.stop_requested():
            raise SystemExit(signals.REQUEUE_EXIT_CODE)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _tiny_key(config: Config) -> str:
    """What the warm-started weights depend on."""
    data = config.data
    file = hashlib.blake2b(Path(data.name).read_bytes()).hexdigest() if Path(data.name).is_file() else None
    parts = [data.name, file, data.options, data.split, data.question_field, data.answer_field, data.chat_template]
    parts += [vars(config.sft), config.model.max_length, config.parallel.tp]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
