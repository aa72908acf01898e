"""Trainers of two and four ranks on GPUs against one of one rank, and their refits to real engines.

On a single GPU the ranks share it (`ranks.py`): all but speed is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranks import Processes, free_port, needs_hopper, rank

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow, pytest.mark.timeout(600), needs_hopper]

SCRIPT = Path(__file__).with_name("trainer_ranks.py")
TE = ["precision.linear_backend=te"]
SP = ["parallel.sequence_parallel=true"]
MIXED = ["precision.mode=mixed"]
FP8_PARAM = ["precision.fp8_param=true"]
WORLDS = {
    "one": (1, [], {"jetrl": [], "te": TE, "mixed": MIXED}),
    "tp2": (2, ["parallel.tp=2"], {"jetrl": [], "sp": SP, "te": TE, "te-sp": [*TE, *SP]}),
    "pp2": (2, ["parallel.pp=2"], {"jetrl": [], "te": TE}),
    "dp2": (2, ["parallel.dp=2"], {"jetrl": [], "te": TE, "fp8_param": FP8_PARAM, "mixed": MIXED}),
    "four": (4, ["parallel.tp=2", "parallel.pp=2", *SP], {"jetrl": [], "fp8_param": FP8_PARAM}),
    "both2": (2, ["parallel.tp=2", "rollout.tp=2"], {"exact": ["precision.parity=exact"]}),
}
"""Name -> number of ranks, parallel sizes, cases."""
ENGINE = {"tp2": "jetrl", "pp2": "jetrl", "dp2": "mixed", "four": "fp8_param", "both2": "exact"}
"""World -> the case that an engine follows, of TP=1 or, in `both2`, of TP=2."""
MANY = ["tp2", "pp2", "dp2", "four"]
LINKS = [(world, way) for world in ENGINE for way in ("cuda-ipc", "nccl") if (world, way) != ("dp2", "nccl")]
"""Worlds and ways of a refit; a rank that holds all the model needs none of another node."""

Seen = Callable[[str, str], dict]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Iterator[Seen]:
    """What a world saw in a case; all worlds run at once."""
    from jetrl_megatron.tiny import make_tiny_model

    model = make_tiny_model(tmp_path_factory.mktemp("model"), 7, heads=4, kv_heads=2, hidden=512, ffn=1024)
    running: dict[str, Processes] = {}
    folders: dict[str, Path] = {}
    for name, (count, sizes, cases) in WORLDS.items():
        folder = folders[name] = tmp_path_factory.mktemp(name)
        settings = {"model": str(model), "folder": str(folder), "sizes": sizes, "cases": cases}
        settings |= {"refit": ENGINE.get(name)}
        (folder / "settings.json").write_text(json.dumps(settings))
        port = free_port()
        environments = [rank(index, count, port) for index in range(count)]
        running[name] = Processes(name, [str(SCRIPT), str(folder / "settings.json")], environments, folder)

    def look(name: str, case: str) -> dict:
        found = folders[name] / "seen.json"
        try:
            running[name].wait(190)
        except AssertionError as error:
            if not found.exists() or case not in json.loads(found.read_text()):
                raise
            print(f"later: {error}")
        return json.loads(found.read_text())[case]

    yield look
    for processes in running.values():
        processes.close()


def _same_as(case: str) -> str:
    """The case of one rank that computes the same."""
    return {"te-sp": "te", "sp": "jetrl", "fp8_param": "jetrl"}.get(case, case)


def _flat(parts: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for part in parts for value in part])


@pytest.mark.parametrize("world", MANY)
def test_fp8_bytes_do_not_depend_on_parallel_sizes(seen: Seen, world: str) -> None:
    for case in WORLDS[world][2]:
        one, many = seen("one", _same_as(case))["digests"], seen(world, case)["digests"]
        assert any(name.endswith("_scale_inv") for name in one) or case == "mixed"
        assert many == one, case


@pytest.mark.parametrize("world", ["pp2", "dp2"])
@pytest.mark.parametrize("backend", ["jetrl", "te"])
def test_log_probs_of_pipeline_and_data_parallel_ranks_are_those_of_one(seen: Seen, world: str, backend: str) -> None:
    assert torch.equal(_flat(seen(world, backend)["logprobs"]), _flat(seen("one", backend)["logprobs"]))


def test_pipeline_stages_of_two_ranks_give_the_log_probs_of_one_stage(seen: Seen) -> None:
    for case in ("jetrl", "fp8_param"):
        assert torch.equal(_flat(seen("four", case)["logprobs"]), _flat(seen("tp2", "sp")["logprobs"])), case


@pytest.mark.parametrize(("sp", "tp"), [("sp", "jetrl"), ("te-sp", "te")])
def test_sequence_parallel_gives_the_log_probs_of_tensor_parallel(seen: Seen, sp: str, tp: str) -> None:
    assert torch.equal(_flat(seen("tp2", sp)["logprobs"]), _flat(seen("tp2", tp)["logprobs"]))


@pytest.mark.parametrize(("case", "mean", "largest"), [("jetrl", 1e-4, 1e-2), ("te", 5e-2, 0.3), ("te-sp", 5e-2, 0.3)])
def test_log_probs_of_tensor_parallel_are_near_those_of_one(seen: Seen, case: str, mean: float, largest: float) -> None:
    """Partial sums are added in FP32 and rounded once, in an order of their own; TE rounds each part to BF16."""
    found = (_flat(seen("tp2", case)["logprobs"]) - _flat(seen("one", _same_as(case))["logprobs"])).abs()
    print(f"tp2 {case}: mean {float(found.mean()):.2e}, largest {float(found.max()):.2e}")
    assert found.mean() < mean
    assert found.max() < largest


@pytest.mark.parametrize("world", MANY)
def test_a_step_has_the_loss_and_gradient_of_one_rank(seen: Seen, world: str) -> None:
    for case in WORLDS[world][2]:
        one, many = seen("one", _same_as(case)), seen(world, case)
        print(f"{world} {case}: loss {many['loss']} of {one['loss']}, norm {many['grad_norm']} of {one['grad_norm']}")
        assert many["loss"] == pytest.approx(one["loss"], rel=5e-3, abs=1e-3)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=3e-2)


@pytest.mark.parametrize("world", ["one", *MANY])
def test_bytes_after_a_step_are_those_of_the_weights(seen: Seen, world: str) -> None:
    for case in WORLDS[world][2]:
        many = seen(world, case)
        assert many["digests_after_step"].keys() == many["digests"].keys()
        assert many["digests_after_step"] != many["digests"]
        assert case.startswith("te") or many["bytes_of_the_weights"], case


@pytest.mark.parametrize("world", ["one", *MANY])
def test_a_checkpoint_restores_every_rank(seen: Seen, world: str) -> None:
    assert {case: seen(world, case)["restored"] for case in WORLDS[world][2]} == dict.fromkeys(WORLDS[world][2], True)


@pytest.mark.parametrize(("world", "way"), LINKS)
def test_an_engine_holds_the_bytes_of_all_ranks(seen: Seen, world: str, way: str) -> None:
    reports = seen(world, "refits")[way]
    tensors = len(seen("one", "jetrl")["digests"])
    assert [(r["tensors"], r["mismatched"]) for r in reports] == [(tensors, 0)] * 2
    if way == "nccl":
        assert all(r["chunks"] > 1 for r in reports)
        # In packs, each rectangle from a multiple of some bytes on.
        assert all(r["sent"] <= r["wire"] < 1.01 * r["sent"] for r in reports)
    else:
        assert all(r["wire"] == 0 for r in reports)


@pytest.mark.parametrize("world", [world for world in ENGINE if world != "dp2"])
def test_the_engine_computes_the_log_probs_of_the_trainer(seen: Seen, world: str) -> None:
    """To the bit where both sides add the same partial sums: equal TP, any PP."""
    reports = [report for way in seen(world, "refits").values() for report in way]
    print(world, [(r["differing"], r["scored"], r["largest"]) for r in reports])
    assert all(r["scored"] > 500 for r in reports)
    if world in ("tp2", "four"):
        assert all(r["largest"] < 1e-2 for r in reports)
    else:
        assert all(r["differing"] == 0 for r in reports)
