"""`precision.parity=exact`: what it refuses, what it finds, and that its sums are the engine's."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jetrl_conversion.model_spec import load_model_spec
from jetrl_kernels.digest import digest
from jetrl_megatron import memory, parity
from jetrl_megatron.activations import Recorder, first_difference, merge
from jetrl_megatron.batch import Sample, pack
from jetrl_megatron.config import Config
from jetrl_megatron.tiny import make_tiny_model
from jetrl_recipes import registry

WORLD = Path(__file__).with_name("exact_world.py")


def refused(config: Config) -> list[str]:
    return [line.removeprefix("precision.parity=exact: ") for line in memory.problems(config, None)]


@pytest.mark.parametrize("name", [n for n in registry.names() if n.endswith("_exact")])
def test_exact_recipes_are_in_the_modes_that_they_promise(name):
    assert registry.get(name).precision.parity == "exact"
    assert memory.problems(registry.get(name), None) == []


def test_everything_that_exact_parity_cannot_promise_is_refused_at_once():
    config = registry.get("qwen3_8b_base_8k_jetrl")
    config.precision.parity, config.precision.linear_backend = "exact", "te"
    tp, backend = sorted(refused(config), reverse=True)
    assert "linear_backend=jetrl, not te" in tp + backend and "not 4 and 1" in tp + backend
    config.parallel.tp = config.rollout.tp = 2
    config.parallel.dp, config.rollout.replicas = 4, 4
    assert any("vocabulary of 151936 is no multiple of 256" in line for line in refused(config))
    config.precision.parity = "off"
    assert refused(config) == []

    config = registry.get("tiny_cpu_exact")
    config.precision.mode, config.rollout.tp = "mixed", 2
    assert [line.split(",")[0] for line in refused(config)] == [
        "needs precision.mode=jetrl",
        "needs rollout.tp=1 on a CPU",
    ]


def test_a_mixture_of_experts_is_refused():
    config = registry.get("qwen3_30b_a3b_8k_bf16")
    config.precision.parity, config.precision.mode = "exact", "jetrl"
    assert any("mixture of experts: neither its router nor its expert GEMMs" in line for line in refused(config))


def test_a_layer_that_stays_bf16_is_refused_and_on_gpus_heads_of_64(tmp_path):
    from rollout_support import write_model

    # KV heads of 64 rows: tiles of 128 would be shared by two heads.
    write_model(tmp_path, head_dim=64)
    config = registry.get("tiny_cpu_exact")
    config.model.path, config.precision.keep_bf16 = str(tmp_path), True
    assert any("linear layers stay BF16" in line for line in refused(config))
    assert not any("heads of 128" in line for line in refused(config))
    on_gpus = parity.problems(config, load_model_spec(tmp_path), cpu=False)
    assert any("needs heads of 128, not 64" in line for line in on_gpus)


def sample(prompt: int, logps: list[float]) -> Sample:
    ids = list(range(10, 10 + len(logps)))
    return Sample(prompt_ids=list(range(prompt)), response_ids=ids, engine_logp=logps, policy_version=0, group=0,
                  finish_reason="stop")  # fmt: skip


def test_the_first_token_that_differs_is_named_with_both_numbers():
    batches = [pack([sample(2, [-1.0, -2.0])], 5), pack([sample(3, [-1.0]), sample(2, [-0.5, -0.25, -0.125])], 10)]
    logps = [b.engine_logp.clone() for b in batches]
    logps[0][4] = 9.0  # padding
    assert parity.first_differing(0, batches, logps) is None
    row = 4 + 2  # second sequence of the second batch, second sampled token
    logps[1][row] = torch.nextafter(torch.tensor(-0.25), torch.tensor(0.0))
    found = parity.first_differing(3, batches, logps)
    assert found is not None
    assert (found.dp_rank, found.micro_batch, found.start, found.index) == (3, 1, 4, 3)
    assert found.tokens == [0, 1, 10, 11, 12] and (found.differing, found.sampled) == (1, 6)
    assert "token 3 (id 11)" in str(found) and "-0.24999998" in str(found) and "-0.25" in str(found)
    logps[1][row] = float("nan")
    assert parity.first_differing(3, batches, logps) is not None


def test_digests_of_shards_by_rows_or_columns_add_up_to_those_of_the_whole():
    x = torch.randn(12, 1, 6).bfloat16()
    x[3, 0, 2] = -0.0
    whole, rows, columns = Recorder(2, 7), [Recorder(2, 7) for _ in range(3)], [Recorder(2, 7) for _ in range(2)]
    whole.add("norm", x)
    for rank, part in enumerate(rows):
        part.add("norm", x[4 * rank : 4 * rank + 4], first_row=4 * rank)
    for rank, part in enumerate(columns):
        part.add("norm", x[..., 3 * rank : 3 * rank + 3], col0=3 * rank)
    want = {"norm": digest(x[2:9, 0] + 0)}
    assert whole.found() == merge(r.found() for r in rows) == merge(c.found() for c in columns) == want
    assert first_difference(want, {"norm": want["norm"] + 1}, 0) == "norm"
    assert first_difference(want, {}, 0) == "norm"
    assert first_difference(want, want, 0) is None


def _fp32_arithmetic(function, types: dict[str, str], constants: dict, aligned: list[str]) -> list[str]:
    """FP32 instructions and shuffles of a Triton kernel compiled for Hopper, without registers' names."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    at = function.arg_names.index
    attributes = {(at(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, types | dict.fromkeys(constants, "constexpr"), constants, attributes)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    lines = [re.sub(r"%\w+", "%", line.strip()) for line in ptx.splitlines()]
    return sorted(x for x in lines if re.match(r"(add|sub|mul|fma|max|div|ex2|lg2|shfl)\b.*(f32|b32)", x))


def test_a_gpus_log_softmax_compiles_to_the_arithmetic_of_vllms_sampler(tmp_path, monkeypatch):
    """The same instructions on FP32 numbers and the same shuffles, hence the same order of every sum. That bits are
    equal is tested on a GPU; importing vLLM's module here would find no driver and leave its kernels out."""
    from jetrl_kernels.fused_logprob import kernel

    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    source = (Path(vllm.origin).parent / "v1/worker/gpu/sample/logprob.py").read_text()
    start, end = (source.index(f"@triton.jit\ndef {name}") for name in ("_topk_log_softmax_kernel", "_ranks_kernel"))
    (tmp_path / "their_logprob.py").write_text(f"import triton\nimport triton.language as tl\n\n{source[start:end]}")
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.import_module("their_logprob")._topk_log_softmax_kernel
    pointers = {"output_ptr": "*fp32", "logits_ptr": "*fp32", "topk_ids_ptr": "*i64"}
    want = _fp32_arithmetic(
        theirs,
        pointers | {"logits_stride": "i32", "vocab_size": "i32"},
        {"topk": 1, "BLOCK_SIZE": 1024, "TOPK_BLOCK_SIZE": 1},
        [*pointers, "logits_stride", "vocab_size"],
    )
    pointers = {"z_ptr": "*fp32", "target_ptr": "*i64", "out_ptr": "*fp32"}
    types = pointers | {"vocab": "i32", "stride": "i32"}
    ours = _fp32_arithmetic(kernel._token_logprob_kernel, types, {"BLOCK": 1024}, [*pointers, "vocab", "stride"])
    assert len(want) > 50 and any(line.startswith("shfl") for line in want)
    assert ours == want


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_bit_anywhere_stops_the_run_and_its_operation_is_named(tmp_path):
    """Trainer at TP=2, engine at TP=1: a weight's, a code's and a result's last bit, on either side."""
    model = make_tiny_model(tmp_path / "model", 3)
    result = tmp_path / "result.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*launcher, str(WORLD), str(model), str(result)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    seen = json.loads(result.read_text())
    assert len(seen["planted"]) == 6
    for operation, said in seen["planted"]:
        assert f"the first operation that differs is {operation}. Nothing was trained" in said
    assert seen["version_after_faults"] == 0
    assert all(seen["strained"]["equal"]) and max(seen["strained"]["cached"]) == 128
    assert seen["sound"] == ["", 0.0]
    assert "the first operation that differs is layer 1, self_attn.k_norm." in seen["engine"][0]
