"""Start the trainer's torchrun world from one command, and say which rank failed when one does."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from jetrl_megatron import first_error, signals
from jetrl_megatron.config import Config, ConfigError
from jetrl_megatron.errors import RunError
from jetrl_megatron.slurm_env import world_from_env


class RunFailed(RunError):
    """A trainer rank failed; the message names the first one, its exit status and its own words."""


def ranks_per_node(config: Config, nnodes: int) -> int:
    """Trainer ranks that each node starts.

    Raises:
        ConfigError: when the world does not divide over the nodes.
    """
    world = config.parallel.world_size
    if world % nnodes:
        raise ConfigError([f"parallel: {world} ranks (tp x pp x cp x dp) do not divide over {nnodes} nodes"])
    return world // nnodes


def launch(task: str, config: Config, output: Path) -> int:
    """Run `jetrl_megatron.worker TASK OUTPUT` on every rank and wait.

    Returns:
        0, or `signals.REQUEUE_EXIT_CODE` when the run was asked to stop and saved its state.

    Raises:
        RunFailed: when a rank failed; the others are stopped.
    """
    world = world_from_env()
    nproc = ranks_per_node(config, world.nnodes)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    one_node = world.nnodes == 1
    launch_config = LaunchConfig(
        min_nodes=world.nnodes,
        max_nodes=world.nnodes,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()) if one_node else "jetrl",
        rdzv_backend="c10d" if one_node else "static",
        rdzv_endpoint=world.rdzv_endpoint,
        rdzv_configs={"timeout": int(config.train.timeout_s), **({} if one_node else {"rank": world.node_rank})},
        local_addr="localhost" if one_node else None,
        max_restarts=0,
        # SIGTERM and SIGUSR1 mean "save and come back": the relay below hands them to the ranks as a file.
        signals_to_handle="SIGINT",
    )
    command = ["-m", "jetrl_megatron.worker", task, str(output)]
    with signals.relay() as extra:
        os.environ.update(extra)
        os.environ.setdefault("OMP_NUM_THREADS", str(config.train.threads))
        # Spinning threads of ranks and engine starve each other on few cores: 273 ms for a layer that takes 1.5.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        try:
            elastic_launch(launch_config, sys.executable)(*command)
        except ChildFailedError as error:
            codes = {failure.exitcode for failure in error.failures.values()}
            # torchrun ends by SIGTERM the ranks that are a moment behind the first to leave.
            if signals.REQUEUE_EXIT_CODE in codes and codes <= {signals.REQUEUE_EXIT_CODE, -signal.SIGTERM}:
                return signals.REQUEUE_EXIT_CODE
            rank, failure = first_error.write(output, world.node_rank, error.failures)
            raise RunFailed(_describe(rank, failure, output)) from None
    return 0


def _describe(rank: int, failure: Any, output: Path) -> str:
    if failure.exitcode < 0:
        how = f"was killed by {signal.Signals(-failure.exitcode).name}"
    else:
        how = f"exited with {failure.exitcode}"
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", message)
    text = str(message).strip().splitlines()
    detail = f": {text[0]}" if text and "Signal" not in text[0] else ""
    return f"trainer rank {rank} {how}{detail}; the other ranks were stopped (logs and checkpoints in {output})"
