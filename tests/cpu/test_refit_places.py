"""Where replicas live, which way their weights take and why, and what a plan costs on a cluster that is not at hand."""

from __future__ import annotations

import re
import sys
import time

import pytest

from jetrl_conversion.known_models import known_config
from jetrl_conversion.layout import Layout
from jetrl_conversion.model_spec import load_model_spec
from jetrl_conversion.planner import plan_reshard
from jetrl_megatron.commands import doctor_checks
from jetrl_megatron.commands.bench_refit import refit
from jetrl_megatron.commands.bench_refit_ranks import run_all
from jetrl_megatron.config import Config, ConfigError, apply_overrides
from jetrl_megatron.layouts import trainer_layout
from jetrl_megatron.memory import gpus_per_node, problems
from jetrl_megatron.refit.packs import schedule
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.simulate import simulate
from jetrl_recipes import registry

QWEN = load_model_spec(known_config("Qwen3-0.6B"))


def config(recipe: str, *overrides: str) -> Config:
    return apply_overrides(registry.get(recipe), overrides)


def test_replicas_are_spread_over_the_nodes_that_sample():
    two = config("tiny_cpu_jetrl", "parallel.nodes=2", "rollout.replicas=3")
    assert Places.of(two, 1).replicas == (0, 0, 1)
    own = config("tiny_cpu_jetrl", "rollout.nodes=2", "rollout.replicas=4", "rollout.tp=2")
    places = Places.of(own, 2, gpu=True)
    assert (places.trainers, places.replicas, places.hosts) == ((0, 0), (1, 1, 2, 2), (1, 1, 2, 2))
    assert [places.receiver(dst) for dst in range(4)] == [2, 3, 4, 5]
    assert Places.of(own, 2).hosts == (1, 2)
    # Trainer ranks of a node take turns in receiving.
    assert [Places((0, 0, 1, 1), (1,), 2).receiver(dst) for dst in range(2)] == [2, 3]


def test_expert_parallel_ranks_are_taken_from_the_data_parallel_ones():
    moe = config("tiny_cpu_bf16", "parallel.tp=2", "parallel.ep=2", "parallel.dp=4", "parallel.pp=1")
    layout = trainer_layout(moe)
    assert layout.world == moe.parallel.world_size == 8
    assert [layout.coords(rank).ep for rank in range(8)] == [0, 0, 1, 1] * 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.nodes=1"], "set rollout.colocated=false"),
        (["rollout.nodes=2", "rollout.replicas=1", "rollout.colocated=false"], "leave some of 2 nodes without work"),
        (["rollout.nodes=1", "rollout.colocated=false", "rollout.replicas=16"], "on 1 nodes need 16 GPUs of one"),
        (["rollout.colocated=false"], "beside the trainer's 8"),
        (["parallel.nodes=2", "rollout.replicas=16"], "need 8 GPUs of one, the trainer has 4 there"),
    ],
)
def test_what_does_not_fit_on_a_node_is_said(overrides, words):
    assert any(words in line for line in problems(config("qwen3_8b_base_8k_jetrl", *overrides), None))


def test_gpus_that_slurm_is_asked_for():
    apart = config("qwen3_8b_base_8k_jetrl", "rollout.nodes=1", "rollout.colocated=false", "rollout.replicas=4")
    assert problems(apart, None) == []
    assert (apart.nodes, gpus_per_node(apart)) == (2, 8)
    assert gpus_per_node(config("qwen3_32b_8k_jetrl")) == 8


def test_doctor_names_the_way_of_each_pair_of_nodes_and_why():
    def said(recipe: str, gpu: bool, *overrides: str) -> list[tuple[str, str]]:
        return [(c.name, c.detail) for c in doctor_checks.refit(config(recipe, *overrides), gpu)]

    *ways, m2n = said("tiny_cpu_jetrl", False, "parallel.nodes=2", "rollout.replicas=2")
    assert m2n[0] == "nccl.m2n" and "not installed" in m2n[1]
    assert sorted(name for name, _ in ways) == ["gloo", "gloo", "shm", "shm"]
    assert ("gloo", "trainers of node 1 to engines of node 0: node 1 and node 0 share no memory") in ways
    # Data parallel copies on both nodes: each node's engines read their own trainers.
    two = ["parallel.nodes=2", "parallel.dp=4", "rollout.replicas=8"]
    assert {name for name, _ in said("qwen3_8b_base_8k_jetrl", True, *two)[:-1]} == {"cuda-ipc"}
    assert {name for name, _ in said("qwen3_32b_8k_jetrl", True)[:-1]} == {"nccl"}, "pipeline stages on other nodes"


def test_a_copy_on_the_same_node_is_preferred_and_others_take_turns():
    source, target = Layout("megatron", tp=2, dp=2), Layout("vllm", dp=2)
    near = plan_reshard(QWEN, source, target, nodes=((0, 0, 1, 1), (0, 1)))
    assert {t.src_rank for t in near.receives(0)} == {0, 1} and {t.src_rank for t in near.receives(1)} == {2, 3}
    far = plan_reshard(QWEN, source, target, nodes=((0, 0, 1, 1), (2, 2)))
    assert far.total_bytes == near.total_bytes
    sent = far.bytes_sent()
    assert max(sent.values()) < 1.3 * min(sent.values()), "data parallel ranks share the sending"


def test_both_ends_derive_the_same_packs_in_the_same_order():
    source, places = Layout("megatron", tp=2, pp=2), Places((0, 0, 0, 0), (1, 2), 2)
    plan = plan_reshard(QWEN, source, Layout("vllm", tp=2, dp=2), nodes=(places.trainers, places.destinations))
    limit = 1 << 20
    held = [schedule(plan, places, m, limit, lambda s, d: True) for m in range(places.members)]
    sent = {pack.key: pack for packs in held[:4] for pack in packs}
    received = {pack.key: pack for packs in held[4:] for pack in packs}
    assert sent == received and max(p.nbytes for p in sent.values()) <= limit
    assert sum(p.payload for p in sent.values()) == plan.total_bytes
    order = sorted(sent, key=lambda k: (k[2], k[3], (k[1] - k[0]) % 4, k[0], k[1]))
    place = {key: n for n, key in enumerate(order)}
    for packs in held:
        mine = [place[pack.key] for pack in packs]
        assert mine == sorted(mine)


def test_simulation_counts_every_byte_once_and_finds_the_fullest_link():
    apart = simulate(QWEN, Layout("megatron", tp=4, dp=2), Layout("vllm", tp=2), 4, colocated=False, gpus_per_node=8,
                     nvlink=450e9, network=50e9)  # fmt: skip
    whole = plan_reshard(QWEN, Layout("hf"), Layout("vllm", tp=2)).total_bytes
    assert apart.bound == apart.network == whole
    fullest = apart.links[0]
    assert fullest.kind == "network in" and fullest.seconds == fullest.nbytes / 50e9
    assert 0.45 * whole < fullest.nbytes < 0.55 * whole, "each of two adapters takes its rank's half"
    together = simulate(QWEN, Layout("megatron", tp=4, dp=2), Layout("vllm", tp=2), 4, colocated=True, gpus_per_node=8,
                        nvlink=450e9, network=50e9)  # fmt: skip
    assert together.network == 0 and together.seconds < apart.seconds < apart.gather_fp8 < apart.gather


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"trainer": "tp=x,dq=2"}, [r"tp must be a positive integer", r"did you mean dp"]),
        (
            {"trainer": "tp=3", "rollout_tp": 3},
            [r"--trainer: 16 .* \(megatron\(tp=2\) would do", r"--rollout-tp: .*vllm\(tp=2\)"],
        ),
        ({"replicas": 0, "rounds": -1, "cpu": True}, [r"choose one", r"--replicas 0: more than 0", r"--rounds -1"]),
        ({"layers": 29}, [r"--layers 29: 1 to 28 of Qwen3-0.6B"]),
    ],
)
def test_bench_says_everything_that_is_wrong(options, lines):
    with pytest.raises(ConfigError) as refused:
        refit("Qwen3-0.6B", simulate=True, **options)
    assert len(refused.value.problems) == len(lines)
    assert all(re.search(line, problem) for line, problem in zip(lines, refused.value.problems)), refused.value.problems


def test_bench_names_the_nearest_model_and_what_does_not_fit_this_machine():
    with pytest.raises(ConfigError, match=r"did you mean Qwen3-1\.7B"):
        refit("Qwen3-0.7B", simulate=True)
    with pytest.raises(ConfigError, match=r"Qwen3-0\.6B: a folder with config\.json"):
        refit("Qwen3-0.6B")
    with pytest.raises(ConfigError, match=r"GB of memory are needed .* fewer --layers .of 64"):
        refit("Qwen3-32B", cpu=True, replicas=999)


def test_bench_ends_with_the_process_that_was_killed_and_ends_the_others():
    started = time.monotonic()
    die, wait = "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)"
    with pytest.raises(OSError, match="process 1 of 2 was killed by SIGKILL"):
        run_all([[sys.executable, "-c", wait], [sys.executable, "-c", die]])
    assert time.monotonic() - started < 30
