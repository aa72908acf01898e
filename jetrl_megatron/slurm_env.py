"""Where a node finds the other nodes of its job: read from the environment, nothing is contacted.

On Slurm every node runs one task, `jetrl train RECIPE`, and each task starts a torchrun agent for its own ranks. The
agents meet at the first host of the job step. `JETRL_NNODES`, `JETRL_NODE_RANK` and `JETRL_RDZV_ENDPOINT` override
what Slurm says, and are enough without Slurm.

Use with torchrun's static rendezvous (`--rdzv-backend static --nnodes N --node-rank R --master-addr HOST
--master-port PORT`): it keeps the node ranks that Slurm gave, so that rank 0 lives on the endpoint's host, while the
c10d backend numbers nodes in order of arrival.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from jetrl_megatron.config import ConfigError

FIRST_PORT, PORTS = 20000, 12000
"""Ports 20000 to 31999: below Linux' ephemeral range (32768-60999), so no client socket holds one by chance."""


class World(NamedTuple):
    nnodes: int
    node_rank: int
    rdzv_endpoint: str
    """`host:port`; `localhost:0` (any free port) on one node."""


def world_from_env(env: Mapping[str, str] | None = None) -> World:
    """Number of nodes, rank of this one, and where they meet.

    Inside an `srun` step the step's own nodes count, not the job's. Outside one (a laptop, or the shell of `salloc`
    and `sbatch`, which run on one node only) the world is this host.

    Raises:
        ConfigError: naming each variable that is missing, malformed or contradicts another.
    """
    env = os.environ if env is None else env
    problems: list[str] = []
    in_step = "SLURM_STEP_ID" in env

    def number(*names: str, default: int) -> int:
        for name in names:
            if env.get(name, "") != "":
                if re.fullmatch(r"\d+", env[name]):
                    return int(env[name])
                problems.append(f"{name}={env[name]!r} is not a number")
                return default
        return default

    slurm = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if in_step else ()
    nnodes = number("JETRL_NNODES", *slurm, default=1)
    node_rank = number("JETRL_NODE_RANK", *(("SLURM_NODEID",) if in_step else ()), default=0)
    tasks = number("SLURM_STEP_NUM_TASKS", default=nnodes) if in_step and "JETRL_NNODES" not in env else nnodes
    if nnodes < 1:
        problems.append(f"JETRL_NNODES={nnodes}: a job has at least one node")
    if tasks != nnodes:
        problems.append(
            f"SLURM_STEP_NUM_TASKS={tasks} on {nnodes} nodes: start one task on each node (srun --ntasks-per-node=1), "
            "it starts the ranks of its node itself"
        )
    if in_step and nnodes > 1 and not {"SLURM_NODEID", "JETRL_NODE_RANK"} & env.keys():
        problems.append("SLURM_NODEID is not set: the container keeps Slurm's variables out (pyxis hands them on)")
    if node_rank >= max(nnodes, 1):
        problems.append(f"node rank {node_rank} is outside a world of {nnodes} nodes")

    endpoint = env.get("JETRL_RDZV_ENDPOINT", "")
    if nnodes > 1 and not endpoint:
        hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
        host = first_host(hosts) if in_step and hosts else env.get("SLURM_LAUNCH_NODE_IPADDR", "")
        if host:
            endpoint = f"{host}:{number('JETRL_RDZV_PORT', default=job_port(env))}"
        else:
            problems.append("JETRL_RDZV_ENDPOINT is not set (HOST:PORT of node 0), and Slurm names no host to meet at")
    elif not endpoint:
        endpoint = "localhost:0"
    if endpoint and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}", endpoint):
        problems.append(f"JETRL_RDZV_ENDPOINT={endpoint!r} is not HOST:PORT")
    if problems:
        raise ConfigError(problems)
    return World(nnodes, node_rank, endpoint)


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: `gpu[003-010,17],cpu1` -> `gpu003`.

    What `scontrol show hostnames LIST | head -1` prints; `scontrol` is rarely there inside a container.
    """
    first = re.split(r",(?![^\[]*\])", nodelist.strip())[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def job_port(env: Mapping[str, str]) -> int:
    """A port that all nodes of a job compute alike; jobs sharing a host, and restarts of one job, differ."""
    job, restart = (int(re.sub(r"\D", "", env.get(key, "")) or 0) for key in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))
    return FIRST_PORT + (job + 1009 * restart) % PORTS
