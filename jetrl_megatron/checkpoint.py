"""Checkpoints of a run: complete under their name or not there, the last few kept, safe to read.

One step is one folder `OUTPUT/checkpoints/step_000010` in Megatron's distributed format (model and FP32 optimizer
state resharded freely on load), with `state.json` and, in `hf`, the model's config.json and tokenizer: it can be
converted, or started from, without the run around it. A save writes into a folder with another name and renames it when
all ranks are done, so a run killed at any moment finds the previous one. A disk without room is noticed before anything
is written, a quota when it is reached; both end the run with one error on all ranks and leave nothing behind.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from jetrl_conversion.disk import FULL, disk_full, require_room
from jetrl_conversion.model_spec import read_config
from jetrl_conversion.safe_pickle import check_metadata
from jetrl_conversion.safetensors_io import side_files, write_side_files
from jetrl_conversion.sources import HF_SUBFOLDER
from jetrl_megatron.checkpoint_names import path, steps
from jetrl_megatron.megatron import patches
from jetrl_megatron.megatron.trainer import Trainer

# `fully_reshardable` is the optimizer layout that loads at any TP, PP and DP.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

BYTES_PER_PARAMETER = 2 + 3 * 4
"""BF16 weight; FP32 master and two moments."""

PROBE_BYTES = 4 << 20
"""More than what a file system that refused a block may still have in pieces."""


def save(trainer: Trainer, output: Path, state: dict[str, Any], keep_last: int) -> None:
    """Save on all ranks together. `state` (JSON) must hold `step`; it is what `load` returns.

    Raises:
        OSError: the disk is full or not writable, the same on all ranks; earlier checkpoints are untouched.
    """
    from megatron.core import dist_checkpointing

    patches.quiet_checkpoint_writer()
    final = path(output, state["step"])
    partial = final.with_name(f".{final.name}.partial")
    need = BYTES_PER_PARAMETER * sum(math.prod(info.shape) for info in trainer.spec.tensors().values())

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        require_room(partial, need)

    with _complete_or_gone(partial, final, need):
        _on_lead(begin)
        with trainer.bf16_weights():
            dist_checkpointing.save(_sharded(trainer, is_loading=False), str(partial), content_metadata=_METADATA)

        def commit() -> None:
            text = json.dumps(state | {"version": trainer.version}, indent=2)
            (partial / "state.json").write_text(text + "\n")
            model = Path(trainer.config.model.path)
            if (model / "config.json").is_file():  # a trainer of its own, as of a benchmark, may have no model folder
                write_side_files(partial / HF_SUBFOLDER, read_config(model), side_files(model))
                _sync(partial / HF_SUBFOLDER)
            _sync(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _sync(final.parent)

        _on_lead(commit)
    if dist.get_rank() == 0:
        for old in steps(output)[:-keep_last]:
            shutil.rmtree(path(output, old))
    dist.barrier()


@contextmanager
def _complete_or_gone(partial: Path, final: Path, need: int) -> Iterator[None]:
    """When a save fails, remove what it wrote; of a full disk or quota say the bytes that it needs and what is free."""
    try:
        yield
    except CheckpointException as failure:  # on all ranks together
        lines = [line for line in str(failure).splitlines() if line.strip()]

        def explain() -> None:
            full = _full(partial)
            shutil.rmtree(partial, ignore_errors=True)
            raise disk_full(final, full, need) if full else OSError(errno.EIO, lines[-1], str(final))

        _on_lead(explain)
    except OSError as error:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise disk_full(final, error.errno, need) if error.errno in FULL else error from None


def _on_lead(work: Callable[[], None]) -> None:
    """Run on rank 0; its OSError is raised on every rank. Collective."""
    box: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if box[0]:
        raise box[0]


def _full(folder: Path) -> int:
    """The system's number for what is full (disk or quota), or 0: torch's own error of a failed write has lost it."""
    try:
        with (folder / "probe").open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno if error.errno in FULL else 0
    return 0


def load(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Load model and optimizer on all ranks, at whatever parallel sizes this world has.

    Returns:
        The state that was saved with it.

    Raises:
        ValueError: the checkpoint's metadata would run code when unpickled, or names what is not a tensor.
    """
    from megatron.core import dist_checkpointing

    check_metadata(folder)
    _initialize_adam(trainer)
    with trainer.bf16_weights():
        loaded = dist_checkpointing.load(_sharded(trainer, is_loading=True), str(folder))
        trainer.core.load_state_dict(loaded["model"])
        trainer.optimizer.load_state_dict(loaded["optimizer"])
        _separate_steps(trainer)
        state = json.loads((folder / "state.json").read_text())
        trainer.version = state["version"]
        trainer.quantize()
    return state


def _sharded(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = _METADATA | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    model = trainer.core.sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _torch_adam_states(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """State of each parameter, where torch's Adam is used (no TE, no apex): it alone counts steps by parameter."""
    for optimizer in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        if isinstance(optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            yield from optimizer.optimizer.state.values()


def _initialize_adam(trainer: Trainer) -> None:
    """Give Adam its state before loading into it: torch's Adam makes it at the first step only, `step` included."""
    for optimizer in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for state in _torch_adam_states(trainer):
        state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _separate_steps(trainer: Trainer) -> None:
    """Megatron's load gives all parameters one `step` tensor, which Adam would then advance once for each of them."""
    for state in _torch_adam_states(trainer):
        state["step"] = state["step"].clone()


def _sync(folder: Path) -> None:
    """Flush files and the folder's entries to the disk, so that the rename never precedes them."""
    for item in (*folder.iterdir(), folder):
        if item.is_file() or item == folder:
            handle = os.open(item, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
