"""Rendezvous from Slurm's variables, and signals on their way to the training loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jetrl_megatron.config import ConfigError
from jetrl_megatron.signals import REQUEUE_EXIT_CODE
from jetrl_megatron.slurm_env import FIRST_PORT, PORTS, first_host, job_port, world_from_env

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-010,17],cpu1", "gpu003"),
        ("gpu[3,5-6]", "gpu3"),
        ("rack[2-3]node[01-04]", "rack2node01"),
        ("a-b.c[10-11]-ib0", "a-b.c10-ib0"),
    ],
)
def test_first_host(nodelist: str, host: str):
    assert first_host(nodelist) == host


def test_laptop_is_a_world_of_one():
    assert world_from_env({}) == (1, 0, "localhost:0")


def test_batch_shell_is_not_a_step():
    """In the shell of `sbatch -N 2` SLURM_NNODES is 2, but only one process runs: waiting for a second would hang."""
    env = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert world_from_env(env) == (1, 0, "localhost:0")


def test_step_meets_at_its_first_host():
    assert world_from_env(STEP) == (2, 1, f"gpu007:{FIRST_PORT + 4711}")


def test_step_on_part_of_the_job_counts_its_own_nodes():
    env = STEP | {"SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "gpu[005-008]"}
    assert world_from_env(env).rdzv_endpoint.startswith("gpu007:")
    assert world_from_env(env).nnodes == 2


def test_container_that_hides_the_node_is_refused():
    """`srun --container` of Slurm 22.05 does; every node would take itself for the first."""
    hidden = {key: value for key, value in STEP.items() if key != "SLURM_NODEID"}
    with pytest.raises(ConfigError, match="SLURM_NODEID is not set"):
        world_from_env(hidden)
    assert world_from_env(hidden | {"JETRL_NODE_RANK": "1"}).node_rank == 1


def test_restart_and_override_change_the_port():
    assert job_port(STEP) != job_port(STEP | {"SLURM_RESTART_COUNT": "1"})
    assert all(FIRST_PORT <= job_port({"SLURM_JOB_ID": str(job)}) < FIRST_PORT + PORTS for job in (0, 1, 99_999_999))
    assert world_from_env(STEP | {"JETRL_RDZV_PORT": "29500"}).rdzv_endpoint == "gpu007:29500"
    assert world_from_env(STEP | {"JETRL_RDZV_ENDPOINT": "10.0.0.1:1234"}).rdzv_endpoint == "10.0.0.1:1234"


def test_without_slurm_the_three_variables_are_enough():
    env = {"JETRL_NNODES": "3", "JETRL_NODE_RANK": "2", "JETRL_RDZV_ENDPOINT": "[fe80::1]:29500"}
    assert world_from_env(env) == (3, 2, "[fe80::1]:29500")


def test_every_problem_is_listed():
    with pytest.raises(ConfigError) as error:
        world_from_env({"JETRL_NNODES": "two", "JETRL_NODE_RANK": "5", "JETRL_RDZV_ENDPOINT": "nowhere"})
    assert len(error.value.problems) == 3
    for word in ("JETRL_NNODES='two'", "node rank 5", "'nowhere' is not HOST:PORT"):
        assert word in str(error.value)


def test_two_tasks_on_a_node_are_refused():
    with pytest.raises(ConfigError, match="one task on each node"):
        world_from_env(STEP | {"SLURM_STEP_NUM_TASKS": "16"})


def test_missing_endpoint_is_refused():
    with pytest.raises(ConfigError, match="JETRL_RDZV_ENDPOINT is not set"):
        world_from_env({"JETRL_NNODES": "2"})


RANK = """
    import sys, time
    from jetrl_megatron import signals
    signals.install()
    print("ready", flush=True)
    while not (why := signals.stop_requested()):
        time.sleep(0.01)
    print(why, flush=True)
    sys.exit(signals.REQUEUE_EXIT_CODE)
"""

LAUNCHER = """
    import os, subprocess, sys
    from jetrl_megatron import signals
    with signals.relay() as env:
        # A new session, as torchrun gives its ranks: the signal does not reach it by itself.
        rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ | env, start_new_session=True)
        sys.exit(rank.wait())
"""


def _start(code: str, *args: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
        # A test run in the background of a script has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_becomes_a_request_to_save(number: signal.Signals):
    process = _start(RANK)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == (f"{number.name}\n", REQUEUE_EXIT_CODE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_launcher_passes_the_request_on(number: signal.Signals):
    process = _start(LAUNCHER, textwrap.dedent(RANK))
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == (f"{number.name}\n", REQUEUE_EXIT_CODE)


def test_a_second_ctrl_c_ends_the_launcher_at_once():
    process = _start(LAUNCHER, "import time; print('ready', flush=True); time.sleep(5)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) not in (0, REQUEUE_EXIT_CODE) and time.monotonic() - begin < 4


def test_more_ranks_than_gpus_are_refused_before_they_start():
    from jetrl_megatron.launcher import check_gpus
    from jetrl_recipes import registry

    check_gpus(registry.get("tiny_cpu_jetrl"), 99)
    with pytest.raises(ConfigError, match="ranks on this machine: 99, GPUs that torch sees: "):
        check_gpus(registry.get("tiny_gpu_jetrl"), 99)


def test_engine_outlives_the_signals():
    code = "from jetrl_megatron import signals; signals.ignore(); print('ready', flush=True); input(); print('alive')"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        process.send_signal(number)
    time.sleep(0.2)
    assert process.communicate("\n", timeout=20)[0] == "alive\n"


def test_job_of_another_size_than_the_recipe_is_refused():
    from jetrl_megatron.commands.prepare_job import node_problems

    assert node_problems(2, {}) == node_problems(2, {"SLURM_NNODES": "2"}) == []
    (line,) = node_problems(4, {"SLURM_NNODES": "2"})
    assert "runs on 4 nodes, this job has 2: submit with --nodes=4" in line
