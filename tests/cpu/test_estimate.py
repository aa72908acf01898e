"""The memory and time model: against arithmetic done by hand, against measured numbers, and its refusals."""

from __future__ import annotations

import pytest

from jetrl_megatron import step_time
from jetrl_megatron.commands import estimate
from jetrl_megatron.config import Config, ConfigError, apply_overrides
from jetrl_megatron.hardware import GIB, GPUS, gpu
from jetrl_megatron.memory import LOGITS_CHUNK, check_state, memory, problems, spec_of
from jetrl_recipes import registry

H100, H200 = GPUS["h100"], GPUS["h200"]
QWEN3_8B = 8_190_735_360
"""Parameters of Qwen3-8B, from its safetensors index."""


def changed(name: str, *overrides: str) -> Config:
    return apply_overrides(registry.get(name), overrides)


@pytest.mark.parametrize("name", registry.names())
def test_every_recipe_fits(name: str):
    config = registry.get(name)
    assert problems(config, H100) == []
    m = memory(config, H100)
    assert 0 < m.state < m.training <= m.peak < H100.memory
    assert m.kv_tokens >= config.model.max_length


def test_state_by_hand_on_one_gpu():
    one = ["parallel.tp=1", "parallel.dp=1", "parallel.sequence_parallel=false", "rollout.replicas=1"]
    m = memory(changed("qwen3_8b_base_8k_bf16", *one), H200)
    assert (m.weights, m.gradients, m.optimizer) == (2 * QWEN3_8B, 4 * QWEN3_8B, 12 * QWEN3_8B)
    assert m.weights + m.gradients + m.optimizer == pytest.approx(148e9, rel=0.01), "measured: about 148 GB"
    assert m.codes == 0
    head_and_embedding = 2 * 151936 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    quantized = QWEN3_8B - head_and_embedding - norms
    fp8 = memory(changed("qwen3_8b_base_8k_jetrl", *one), H200)
    assert fp8.codes == pytest.approx(2 * quantized * (1 + 4 / 128**2))
    assert memory(changed("qwen3_8b_base_8k_jetrl", *one, "precision.fp8_param=true"), H200).weights == pytest.approx(
        2 * (head_and_embedding + norms)
    )
    assert fp8.engine_weights == pytest.approx(2 * (head_and_embedding + norms) + quantized * (1 + 4 / 128**2))


def test_a_state_that_exceeds_the_gpu_is_refused_with_its_parts():
    one = ["parallel.tp=1", "parallel.dp=1", "parallel.sequence_parallel=false", "rollout.replicas=1"]
    config = changed("qwen3_8b_base_8k_bf16", *one)
    with pytest.raises(ConfigError, match=r"weights 15.3, gradients 30.5, optimizer 91.5\), its GPU has 79.1: raise"):
        check_state(config, spec_of(config), H100.memory)
    check_state(config, spec_of(config), H200.memory)


def test_activations_by_hand():
    """Qwen3-8B at TP=2 with sequence parallel, one sequence of 9216 tokens, 36 layers."""
    tp2 = ["parallel.tp=2", "parallel.dp=4"]
    layer = (8 * 4096 + 2 * (4096 + 2048) + 2 * (4096 + 1024) + 2 * 4096 + 4 * 32 + 6 * 12288) / 2
    full = memory(changed("qwen3_8b_base_8k_bf16", *tp2), H100).activations
    assert full == pytest.approx(9216 * (36 * layer + 8 * 4096))
    less = memory(changed("qwen3_8b_base_8k_bf16", *tp2, "model.recompute=true"), H100).activations
    assert less == pytest.approx(9216 * (36 * 2 * 4096 / 2 + layer + 8 * 4096))


def test_pipeline_stages_hold_several_micro_batches():
    one = memory(changed("qwen3_32b_8k_bf16", "parallel.pp=1", "parallel.dp=4"), H100)
    two = memory(changed("qwen3_32b_8k_bf16"), H100)
    assert two.weights < 0.6 * one.weights
    assert two.activations == pytest.approx(one.activations), "half of the layers, twice the micro-batches"


def test_logits_chunk_is_the_kernels():
    from jetrl_kernels.fused_logprob import CHUNK_LOGITS

    assert LOGITS_CHUNK == CHUNK_LOGITS


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.micro_batch_size=8"], "memory: training needs .* GiB of the 79.1 GiB of one H100: raise"),
        (["rollout.gpu_memory_utilization=0.9"], "memory: sampling needs"),
        (["rollout.gpu_memory_utilization=0.15"], "a KV cache of .* tokens, one sequence needs 9216"),
        (["parallel.tp=8", "parallel.dp=1", "model.path=Qwen2.5-7B"], "28 attention heads do not divide by tp = 8"),
        (["parallel.pp=8", "parallel.tp=1", "parallel.sequence_parallel=false", "parallel.dp=1"], "36 layers"),
        (["parallel.dp=4"], "16 GPUs do not fit into 1 nodes of 8"),
        (["parallel.nodes=3"], "8 ranks do not divide over 3 nodes"),
        (
            ["rollout.tp=16", "rollout.replicas=1"],
            "1 replicas of tp=16 on 1 nodes need 16 GPUs of one, the trainer has 8 there",
        ),
        (["model.path=Qwen3-9B"], "no known model; did you mean Qwen3-8B"),
        (["model.path=Qwen2.5-0.5B", "parallel.tp=2", "parallel.dp=4"], "tiles break in megatron"),
        (["model.max_length=50000"], "50000 tokens, the model has 40960 positions"),
        (["model.path=Qwen3-30B-A3B"], "mixture-of-experts models are not trained in FP8"),
    ],
)
def test_refusals(overrides: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        estimate.run("qwen3_8b_base_8k_jetrl", overrides)


def test_all_violations_at_once():
    config = changed("qwen3_8b_base_8k_jetrl", "train.micro_batch_size=8", "rollout.gpu_memory_utilization=0.95")
    found = problems(config, H100)
    assert len(found) == 2 and "training needs" in found[0] and "sampling needs" in found[1]


@pytest.mark.parametrize(
    ("weights", "sequences", "measured"),
    [(2, 32, 4273), (2, 256, 13330), (1, 32, 5266), (1, 256, 18124)],
)
def test_decode_rate_against_measurement(weights: int, sequences: int, measured: float):
    """Qwen3-8B on one H200, 256 prompt and 512 generated tokens: tokens/s as measured with vLLM 0.26."""
    config = changed("qwen3_8b_base_8k_bf16" if weights == 2 else "qwen3_8b_base_8k_jetrl")
    m = memory(config, H200)
    seconds = step_time.decode_step(m.engine_weights, sequences, 512, m.kv_token, H200)
    assert sequences / seconds == pytest.approx(measured, rel=0.2)


def test_fp8_is_faster_in_both_phases():
    times = {
        mode: step_time.step_time(registry.get(f"qwen3_32b_16k_{mode}"), H100) for mode in ("bf16", "mixed", "jetrl")
    }
    assert times["jetrl"].rollout == times["mixed"].rollout < times["bf16"].rollout
    assert times["jetrl"].training < times["mixed"].training == times["bf16"].training


def test_more_nodes_take_less_time(capsys: pytest.CaptureFixture[str]):
    config = registry.get("qwen3_8b_base_8k_jetrl")
    two = estimate.on_nodes(config, 2)
    assert (two.parallel.dp, two.rollout.replicas, two.parallel.nodes) == (4, 16, 2)
    assert step_time.step_time(two, H100).total < step_time.step_time(config, H100).total
    estimate.run("qwen3_8b_base_8k_jetrl", nodes=2, device="h200")
    out = capsys.readouterr().out
    assert "16 x H200 on 2 node(s)" in out and "estimate" in out


def test_unknown_gpu_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        gpu("h10")


def test_list_shows_every_recipe():
    rows = {row.name: row for row in estimate.rows()}
    assert sorted(rows) == sorted(registry.names()) and next(iter(rows)).startswith("tiny_cpu")
    assert rows["tiny_cpu_jetrl"].gpus == "CPU"
    assert rows["qwen3_32b_8k_jetrl"].gpus == "32 x H100"
    assert float(rows["qwen3_32b_8k_jetrl"].memory.split()[0]) * GIB < H100.memory
    assert estimate.list_text().count("\n") == len(rows)


def test_model_of_every_recipe_is_known():
    assert {spec_of(config).family for config in registry.all().values()} >= {"qwen2", "qwen3", "llama", "qwen3_moe"}
