"""Exact parity of a trainer at TP=2: its log-probs are those of its arithmetic on one GPU, in any batch.

The arithmetic is the engine's at TP=2 (`rollout/layers.py`): FP32 sums of two halves, each by the kernel of one rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Processes, free_port, needs_hopper, rank

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow, pytest.mark.timeout(400), needs_hopper]

SCRIPT = Path(__file__).with_name("exact_ranks.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Iterator[dict[int, dict]]:
    """TP -> what its rank 0 saw."""
    from jetrl_megatron.tiny import make_tiny_model

    model = make_tiny_model(
        tmp_path_factory.mktemp("model"), 7, heads=4, kv_heads=2, hidden=512, ffn=1024, max_positions=8192
    )
    running, folders = {}, {}
    for tp in (1, 2):
        folder = folders[tp] = tmp_path_factory.mktemp(f"tp{tp}")
        (folder / "settings.json").write_text(json.dumps({"model": str(model), "folder": str(folder), "tp": tp}))
        port = free_port()
        environments = [rank(index, tp, port) for index in range(tp)]
        running[tp] = Processes("exact", [str(SCRIPT), str(folder / "settings.json")], environments, folder)
    try:
        for processes in running.values():
            processes.wait(300)
        yield {tp: json.loads((folder / "seen.json").read_text()) for tp, folder in folders.items()}
    finally:
        for processes in running.values():
            processes.close()


def test_two_ranks_have_the_log_probs_of_their_halves_on_one(seen: dict[int, dict]) -> None:
    assert seen[2]["together"] == seen[1]["together"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_sequence_alone_has_the_log_probs_of_one_in_a_batch(seen: dict[int, dict], tp: int) -> None:
    assert seen[tp]["alone"] == seen[tp]["together"]


def test_a_sum_over_two_ranks_does_not_depend_on_its_size(seen: dict[int, dict]) -> None:
    assert seen[2]["sums"] == [True] * 4
