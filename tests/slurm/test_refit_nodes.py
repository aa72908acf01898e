"""Engines on other nodes than the first trainer's, on a real two-node Slurm: replicas beside the trainers of both
nodes, and a replica on a node of its own. Nothing is shared between the nodes but folders; the metrics are those of one
node.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from cluster import REPO, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

RECIPE = "tiny_cpu_jetrl"
SMALL = {
    "train.steps": 2,
    "train.checkpoint_every": 2,
    "sft.steps": 5,
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 4,
    "rollout.max_response_tokens": 16,
    "rollout.replicas": 2,
    "data.eval_size": 4,
    # A machine that is busy with other things takes minutes to start two nodes' worth of processes.
    "train.timeout_s": 1200,
    "rollout.start_timeout_s": 1200,
}
LAYOUTS = {
    "one node": {},
    "replicas on both nodes": {"parallel.nodes": 2},
    "replicas on a node of their own": {"rollout.nodes": 1, "refit.delta": "true"},
}
CLOCK = ("seconds", "per_second", "refit_bytes", "refit_wire_bytes")
"""Depend on the machine's mood, or on the number of nodes."""


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory(prefix="jetrl-refit-", dir="/var/tmp") as name:
        yield Path(name)


def run(slurm: Cluster, folder: Path, name: str) -> list[dict]:
    """The job's metrics, all of them."""
    settings = SMALL | LAYOUTS[name]
    nodes = settings.get("parallel.nodes", 1) + settings.get("rollout.nodes", 0)
    output = folder / name.replace(" ", "-")
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = ["sbatch", "--parsable", f"--nodes={nodes}", f"--output={folder}/%j.log", "slurm/train.sbatch", RECIPE]
    env = {"XDG_CACHE_HOME": str(folder / "cache"), "JETRL_RUN_DIR": str(output)}
    job = slurm.run(*command, *sets, env=env, cwd=REPO).stdout.strip()
    state = slurm.wait(job, timeout=1200)["JobState"]
    log = folder / f"{job}.log"
    assert state == "COMPLETED", log.read_text()[-6000:] if log.exists() else slurm.logs()
    assert not (output / ".agents.json").exists(), "the key of a run ends with it"
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_engines_on_other_nodes_give_the_metrics_of_one(slurm: Cluster, folder: Path):
    found = {name: run(slurm, folder, name) for name in LAYOUTS}
    steady = {
        name: [{k: v for k, v in line.items() if not any(word in k for word in CLOCK)} for line in lines]
        for name, lines in found.items()
    }
    one = steady.pop("one node")
    assert [line["step"] for line in one] == [1, 2]
    assert all(line["refit_tensors_mismatched"] == 0 and line["refit_tensors"] > 0 for line in one)
    for lines in steady.values():
        assert lines == one
    copy = found["one node"][0]["refit_bytes"]
    first, second = (line["refit_wire_bytes"] for line in found["replicas on both nodes"])
    # One trainer rank on each node: half of each node's copy comes from the other.
    assert found["replicas on both nodes"][0]["refit_bytes"] == 2 * copy
    assert first == second and 0.8 * copy < first < 1.2 * copy
    assert [line["refit_wire_bytes"] for line in found["one node"]] == [0, 0]
    far = [line["refit_wire_bytes"] for line in found["replicas on a node of their own"]]
    assert copy <= far[0] < 1.2 * copy and far[1] < far[0], "only what changed goes again"
    logs = folder / "replicas-on-both-nodes"
    assert all((logs / f"engine-{replica}.log").is_file() for replica in (0, 1))
