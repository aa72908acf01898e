"""`jetrl train` over several nodes of one GPU each: two trainer ranks at TP=2, engines elsewhere or beside both.

Nothing but folders is shared between the nodes. On a single GPU all nodes share it (`ranks.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ranks import Processes, free_port, needs_hopper, node

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow, pytest.mark.timeout(900), needs_hopper]

ANSWER = "7"
QUESTIONS = [f"What is {n + 7} - {n}?" for n in range(64)]
COMMON = {
    "model.max_length": 64,
    "parallel.tp": 2,
    "parallel.nodes": 2,
    "rollout.enforce_eager": "true",
    "rollout.max_response_tokens": 8,
    "rollout.max_num_seqs": 64,
    "rollout.max_num_batched_tokens": 1024,
    "rollout.memory_gib": 0.5,
    "refit.staging_mib": 1,
    "refit.timeout_s": 60,
    "grpo.prompts_per_step": 8,
    "grpo.group_size": 8,
    "optimizer.lr": 1e-3,
    "data.options": "{}",
    "train.checkpoint_every": 2,
}
LAYOUTS = {
    "apart": {"rollout.nodes": 1, "rollout.colocated": "false"},
    "beside": {"rollout.replicas": 2, "rollout.colocated": "true"},
    "exact": {"rollout.replicas": 2, "rollout.colocated": "true", "parallel.tp": 1, "parallel.pp": 2}
    | {"precision.parity": "exact"},
}
"""The engine on a third node, or one beside each trainer rank, whose weights come half from the other node."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder / "model", heads=4, kv_heads=2, hidden=512, ffn=1024)
    lines = [json.dumps({"question": question, "answer": ANSWER}) for question in QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return COMMON | {"model.path": folder / "model", "data.name": folder / "data.jsonl"}


def make_model(folder: Path, **sizes: int) -> None:
    """A model that knows nothing but says the answer now and then: there is something to learn, and weights move."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    from jetrl_megatron.tiny import make_tiny_model

    make_tiny_model(folder, 7, questions=QUESTIONS, tied=False, **sizes)
    tensors = load_file(folder / "model.safetensors")
    # One channel has the same sign whatever the input is, and the head takes it for the answer.
    tensors["model.embed_tokens.weight"][:, 0] = 4.0
    tensors["lm_head.weight"][AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(ANSWER), 0] = 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def start(settings: dict[str, object], steps: int, output: Path, *flags: str) -> Processes:
    """`jetrl train` on every node."""
    settings = settings | {"train.steps": steps}
    count = 2 + int(str(settings.get("rollout.nodes", 0)))
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    meet = {"JETRL_NNODES": str(count), "JETRL_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    nodes = [node(index, count) | meet | {"JETRL_NODE_RANK": str(index)} for index in range(count)]
    command = ["-m", "jetrl_megatron.cli", "train", "tiny_2gpu_jetrl", "--output", str(output), *flags, *words]
    return Processes(f"{output.name}-to-{steps}", command, nodes, output.parent)


def metrics(output: Path) -> list[dict]:
    """The lines so far."""
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(settings: dict[str, object], steps: int, output: Path, *flags: str) -> list[dict]:
    """The run's metrics at its end."""
    with start(settings, steps, output, *flags) as running:
        try:
            running.wait(160)
        except AssertionError as error:
            logs = [f"--- {log.name}\n{Processes.tail(log)}" for log in sorted(output.glob("*.log"))]
            raise AssertionError("\n".join([str(error), *logs])) from None
    return metrics(output)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_refits_reach_engines_of_other_nodes_and_a_run_resumes(settings, layout: str, tmp_path: Path) -> None:
    chosen = settings | LAYOUTS[layout]
    lines = train(chosen, 3, tmp_path / layout)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["refit_tensors"] > 20 and line["refit_tensors_mismatched"] == 0 for line in lines)
    # `apart`: the whole model goes to another node. Else: to each node what the other one holds.
    share = 1.0 if layout == "apart" else 0.5
    assert all(line["refit_wire_bytes"] == pytest.approx(share * line["refit_bytes"], rel=0.2) for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines)
    assert layout != "exact" or all(line["logprob_mismatch_fraction"] == 0 for line in lines)
    if layout == "apart":
        resumed = train(chosen, 5, tmp_path / layout, "--resume")
        assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5]
        assert resumed[:3] == lines
        assert all(line["refit_tensors_mismatched"] == 0 for line in resumed)


def test_a_node_that_only_samples_is_lost_and_comes_back(settings, tmp_path: Path) -> None:
    """Its receiver is killed, in a transfer or between two: the trainers go on with the other node's replica."""
    chosen = settings | LAYOUTS["apart"] | {"rollout.nodes": 2, "rollout.replicas": 2, "train.checkpoint_every": 1000}
    output = tmp_path / "lost"
    with start(chosen, 1000, output) as running:

        def until(what: Callable[[list[dict]], bool], seconds: float) -> list[dict]:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and all(p.poll() is None for p in running.running):
                if what(lines := metrics(output)):
                    return lines
                time.sleep(0.3)
            states, tails = [p.poll() for p in running.running], [Processes.tail(log) for log in running.logs]
            raise AssertionError("\n---\n".join([f"not in {seconds:.0f} s; exit statuses {states}", *tails]))

        lines = until(lambda lines: len(lines) >= 3, 120)
        wire = lines[-1]["refit_wire_bytes"]
        (receiver,) = [
            p for p in psutil.Process(running.running[3].pid).children() if "jetrl_megatron.rollout.host" in p.cmdline()
        ]
        receiver.kill()
        # One node's copy is sent, not two; then two again.
        lost = until(lambda lines: lines[-1]["refit_wire_bytes"] < 0.6 * wire, 60)
        lines = until(lambda lines: len(lines) > len(lost) and lines[-1]["refit_wire_bytes"] == wire, 120)
    assert all(line["refit_tensors_mismatched"] == 0 for line in lines)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    log = running.logs[0].read_text()
    assert "out of rotation" in log
