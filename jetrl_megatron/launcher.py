"""Start the trainer's torchrun world from one command, and say which rank failed when one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from jetrl_megatron import first_error, signals
from jetrl_megatron.config import Config, ConfigError
from jetrl_megatron.errors import RunError
from jetrl_megatron.slurm_env import World, world_from_env

HOST_STARTS = 3
"""How often the host process of a node that only samples is started."""


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


def check_gpus(config: Config, ranks: int) -> None:
    """Raises ConfigError where this machine has no GPU for each of `ranks`; else only their tracebacks would say so."""
    if config.train.device == "cpu":
        return
    import torch

    gpus = torch.cuda.device_count()
    if gpus < ranks and (gpus or config.train.device == "cuda"):
        raise ConfigError([f"train.device: trainer ranks on this machine: {ranks}, GPUs that torch sees: {gpus}"])


def launch(task: str, config: Config, output: Path) -> int:
    """Run `jetrl_megatron.worker TASK OUTPUT` on every rank and wait. Returns and raises as `run_ranks`.

    On a node that only samples (`rollout.nodes`, the job's last ones) its host process runs instead.
    """
    world = world_from_env()
    hosts = config.rollout.nodes if task == "train" else 0
    if hosts:
        if world.nnodes != config.nodes:
            said = f"{config.parallel.nodes} nodes train and {hosts} sample, and this job has {world.nnodes}"
            raise ConfigError([f"rollout.nodes: {said}"])
        if world.node_rank >= config.parallel.nodes:
            return run_hosts(config, output, world.node_rank)
        world = world._replace(nnodes=config.parallel.nodes)
    # Spinning threads of ranks and engine starve each other on few cores: 273 ms for a layer that takes 1.5.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(config.train.threads))
    # SyntaxWarnings are those of Megatron's files, said when they are compiled at their first import.
    command = ["-W", "ignore::SyntaxWarning", "-m", "jetrl_megatron.worker", task, str(output)]
    ranks = ranks_per_node(config, world.nnodes)
    check_gpus(config, ranks)
    return run_ranks(command, world, ranks, config.train.timeout_s, output, one_node=world.nnodes == 1 and not hosts)


def run_hosts(config: Config, output: Path, node: int) -> int:
    """Run the host processes of a node that only samples, and wait. When one dies all are replaced, `HOST_STARTS` in
    all: they drive engines together.

    Raises:
        RunFailed: also the last ones failed.
    """
    import torch

    gpu = config.train.device != "cpu" and torch.cuda.is_available()
    command = [sys.executable, "-m", "jetrl_megatron.rollout.host", str(output), str(node)]
    codes: list[int] = []
    for _ in range(HOST_STARTS):
        with signals.relay():  # Slurm's signal is for the trainers; this node ends when they say so
            running = [subprocess.Popen([*command, str(i)]) for i in range(config.rollout.tp if gpu else 1)]
            try:
                while not any(p.poll() for p in running) and any(p.poll() is None for p in running):
                    time.sleep(0.2)
            finally:  # one failed, or a second Ctrl-C
                for process in running:
                    process.kill()
            codes = [process.wait() for process in running]
        if not any(codes):
            return 0
        print(f"host processes of node {node} ended with {codes}", file=sys.stderr, flush=True)
    raise RunFailed(f"the host processes of node {node} failed {HOST_STARTS} times, at last with {codes}")


def run_ranks(
    command: list[str], world: World, ranks: int, timeout_s: float, output: Path, one_node: bool | None = None
) -> int:
    """Start `python COMMAND` for each of this node's ranks, in one world with the other nodes', and wait.

    Args:
        ranks: how many this node starts.
        timeout_s: longest wait for the other nodes.
        output: run folder; the first failure is recorded there.
        one_node: nobody elsewhere looks for this world; by default, if it has one node.

    Returns:
        0, or `signals.REQUEUE_EXIT_CODE` when the run was asked to stop: it saved its state, or was still starting and
        had none to save.

    Raises:
        RunFailed: when a rank failed; the others are stopped.
        KeyboardInterrupt: stopped at once, by a second Ctrl-C.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    one_node = world.nnodes == 1 if one_node is None else one_node
    launch_config = LaunchConfig(
        min_nodes=world.nnodes,
        max_nodes=world.nnodes,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()) if one_node else "jetrl",
        rdzv_backend="c10d" if one_node else "static",
        rdzv_endpoint=world.rdzv_endpoint,
        rdzv_configs={"timeout": int(timeout_s), **({} if one_node else {"rank": world.node_rank})},
        local_addr="localhost" if one_node else None,
        max_restarts=0,
        # The others mean "save and come back": the relay below hands them to the ranks as a file.
        signals_to_handle="SIGQUIT",
    )

    def at_once(*_: object) -> None:
        raise SignalException("interrupted", signal.SIGKILL)  # what torchrun then sends to the ranks

    with signals.relay(at_once) as extra:
        os.environ.update(extra)
        try:
            elastic_launch(launch_config, sys.executable)(*command)
        except SignalException as error:
            raise KeyboardInterrupt from error
        except ChildFailedError as error:
            asked = Path(extra[signals.STOP_FILE]).exists()
            if first_error.all_stopped(error.failures, asked):
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
