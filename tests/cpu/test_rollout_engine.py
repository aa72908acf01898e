"""A real vLLM engine in its own process: weights in, answers out, and what it must refuse."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import numpy as np
import pytest
import torch
from gemm_recorder import GemmRecorder, as_arrays
from rollout_support import Sender, quantized_names, random_weights, trainer_logprobs, write_model

from jetrl_kernels.gemm_fp8 import gemm_fprop
from jetrl_kernels.quant_weight import quant_weight
from jetrl_megatron.config import Config
from jetrl_megatron.refit.digests import differing, merge_digests
from jetrl_megatron.refit.message import RefitRefused
from jetrl_megatron.refit.shm import PREFIX, segment_folder
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.types import EngineDied, GenerationRefused, Sampling

pytestmark = pytest.mark.slow

TRAINING = Sampling(temperature=1.0, max_tokens=24, stop_token_ids=(2,))
GREEDY = Sampling(temperature=0.0, max_tokens=24, stop_token_ids=(2,), for_training=False)


class House:
    """One engine and the weights that it holds."""

    def __init__(self, folder, output):
        self.spec = write_model(folder)
        self.quantized = quantized_names(self.spec)
        self.w0, self.w1 = random_weights(self.spec, 0), random_weights(self.spec, 1)
        self.sender = Sender(self.spec, self.quantized)
        config = Config()
        config.model.max_length = 384
        config.rollout.memory_gib = 0.25
        config.rollout.call_timeout_s = 120.0
        self.engine = RolloutEngine(
            folder,
            config,
            quantized=self.quantized,
            output=output,
            worker_extension="rollout_faults.FaultyWorker",
        )

    def load(self, weights, chunks: int = 1) -> dict[str, int]:
        """Refit to the next version."""
        version = 0 if self.engine.version is None else self.engine.version + 1
        digests: dict[str, int] = {}
        for message in self.sender.messages(version, weights, chunks):
            digests = self.engine.refit(message)
        return digests

    def live_digests(self) -> dict[str, int]:
        return merge_digests(self.engine.call_workers("jetrl_digests"))


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    house = House(tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("output"))
    with house.engine:
        yield house
    house.sender.segment.unlink()


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count * 1000 + length)
    return torch.randint(3, 256, (count, length), generator=generator).tolist()


def test_generation_before_the_first_refit_is_refused(house):
    with pytest.raises(GenerationRefused, match="refit first"):
        house.engine.generate([[5, 6]], [0], TRAINING)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainer_log_probs_equal_the_engines_bit_for_bit(house, temperature):
    """FP8 linears, norms, rope, attention and head are the same functions; the engine decodes token by token from a
    paged cache across block borders, in batches of mixed lengths, the trainer reads packed sequences at once."""
    house.load(house.w0)
    asked = prompts(9, 5) + prompts(5, 120) + prompts(3, 250)
    sampling = dataclasses.replace(TRAINING, temperature=temperature)
    answers = house.engine.generate(asked, list(range(len(asked))), sampling)
    sequences = [a.prompt_ids + a.token_ids for a in answers]
    expected = trainer_logprobs(house.spec, house.w0, house.quantized, sequences, temperature)
    for answer, logp in zip(answers, expected):
        assert torch.equal(torch.tensor(answer.logprobs), logp[len(answer.prompt_ids) - 1 :])


def first_of_fused(name: str) -> str:
    """Hugging Face name of an engine's weight; of a fused one the first, as the same activations meet all of them."""
    return name.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj")


@pytest.mark.parametrize("rows", [1, 31, 32, 256])
def test_codes_and_scales_that_enter_every_gemm_are_the_trainers(house, monkeypatch, rows):
    """Prefill of `rows` tokens of one prompt, and (as far as the engine's batch goes) one token of `rows` sequences."""
    house.load(house.w0)
    bytes_of = {id(house.w0[name]): quant_weight(house.w0[name]) for name in house.quantized}
    monkeypatch.setattr("rollout_support.quant_weight", lambda weight: bytes_of[id(weight)])
    monkeypatch.setattr("jetrl_kernels.fp8_linear.gemm_fprop", gemm_fprop)  # undone at the end
    ours = GemmRecorder(("jetrl_kernels.fp8_linear",))
    most = min(rows, house.engine.settings.max_num_seqs)
    prefill, decode = (1, rows, 1, range(rows)), (most, 3, 2, range(3, 5 * most, 5))
    for count, length, new, taken in (prefill, decode):
        asked = dataclasses.replace(TRAINING, max_tokens=new, stop_token_ids=())
        house.engine.call_workers("record_gemms")
        answers = house.engine.generate(prompts(count, length), list(range(count)), asked)
        theirs = house.engine.call_workers("recorded_gemms", len(taken))[0]
        assert len(theirs) == 4 * house.spec.num_layers
        sequences = [a.prompt_ids + a.token_ids for a in answers]
        ours.start()
        trainer_logprobs(house.spec, house.w0, house.quantized, sequences, 1.0)
        for name, got in theirs.items():
            met = bytes_of[id(house.w0[first_of_fused(name)])]
            codes, scale = ours.entered(met.codes, sum(map(len, sequences)))
            want = as_arrays((codes.view(torch.uint8)[taken].view(codes.dtype), scale[taken]))
            assert all(np.array_equal(g, w) for g, w in zip(got, want)), name
    house.engine.call_workers("stop_recording")


def test_an_answer_depends_on_prompt_and_seed_alone(house):
    house.load(house.w0)
    asked, seeds = prompts(20, 30), list(range(100, 120))
    whole = house.engine.generate(asked, seeds, TRAINING)
    order = [7, 3, 19, 0, 11]
    part = house.engine.generate([asked[i] for i in order], [seeds[i] for i in order], TRAINING)
    for i, answer in zip(order, part):
        assert (answer.token_ids, answer.logprobs) == (whole[i].token_ids, whole[i].logprobs)
    other = house.engine.generate([asked[0]] * 2, [0, 1], TRAINING)
    assert other[0].token_ids != other[1].token_ids


def test_second_refit_in_chunks_and_twenty_more(house):
    """Case 10: parameters are overwritten where they are, memory does not grow, digests do not change."""
    house.load(house.w0)
    before = house.engine.call_workers("storage")
    first = house.load(house.w1, chunks=3)
    assert house.load(house.w1, chunks=3) == first
    greedy = house.engine.generate(prompts(4, 20), [0] * 4, GREEDY)
    resident = house.engine.call_workers("resident_bytes")[0]
    for _ in range(20):
        assert house.load(house.w1) == first
    # Twenty copies of one layer would be 13 MiB; malloc takes memory 4 MiB at a time.
    assert house.engine.call_workers("resident_bytes")[0] - resident < 10 << 20
    assert house.engine.call_workers("storage") == before
    again = house.engine.generate(prompts(4, 20), [0] * 4, GREEDY)
    assert [a.token_ids for a in again] == [a.token_ids for a in greedy]


def _without(slots, name):
    return tuple(s for s in slots if s.name != name)


def _renamed(slots, name, new):
    return tuple(dataclasses.replace(s, name=new) if s.name == name else s for s in slots)


QKV = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda s: _without(s, QKV + "_scale_inv"), [f"{QKV}_scale_inv: missing"]),
        (
            lambda s: _renamed(s, QKV + "_scale_inv", QKV + "_scale"),
            [f"{QKV}_scale_inv: missing", f"{QKV}_scale: the engine has no such", f"did you mean '{QKV}_scale_inv'"],
        ),
        (lambda s: (*s, next(x for x in s if x.name == QKV)), [f"{QKV}: in the message 2 times"]),
        (
            lambda s: tuple(dataclasses.replace(x, dtype="bfloat16") if x.name == QKV else x for x in s),
            [f"{QKV}: bfloat16 [1024, 256], the engine holds float8_e4m3fn [1024, 256]"],
        ),
        (
            lambda s: tuple(dataclasses.replace(x, shape=(512, 512)) if x.name == QKV else x for x in s),
            [f"{QKV}: float8_e4m3fn [512, 512]"],
        ),
        (
            lambda s: tuple(dataclasses.replace(x, offset=1 << 40) if x.name == QKV else x for x in s),
            [f"{QKV}: ends at byte"],
        ),
    ],
    ids=["missing-scale", "wrong-suffix", "duplicate", "wrong-dtype", "wrong-shape", "beyond-the-segment"],
)
def test_wrong_messages_change_nothing(house, change, said):
    """Case 11. The segment holds other weights, so that anything copied would show."""
    held = house.load(house.w0)
    message = house.sender.message(house.engine.version + 1, house.w1)
    with pytest.raises(RefitRefused) as refused:
        house.engine.refit(dataclasses.replace(message, slots=(change(message.slots[0]),)))
    for text in said:
        assert any(text in problem for problem in refused.value.problems), refused.value.problems
    assert house.live_digests() == held
    assert house.engine.generate([[5, 6]], [0], TRAINING)[0].version == house.engine.version


def test_wrong_versions_policies_and_chunks_change_nothing(house):
    held = house.load(house.w0)
    good = house.sender.message(house.engine.version + 1, house.w1)
    for wrong, said in [
        (dataclasses.replace(good, version=good.version + 1), f"takes {good.version} next"),
        (dataclasses.replace(good, version=good.version - 1), f"takes {good.version} next"),
        (dataclasses.replace(good, scales="fp32"), "scale policy 'fp32'"),
        (dataclasses.replace(good, segments=(), slots=()), "0 segments"),
        (dataclasses.replace(good, segments=("/dev/shm/jetrl-segment-0-none",)), "No such file"),
        (dataclasses.replace(good, chunk=1, chunks=3), "chunk 1 of 3 came where chunk 0 was due"),
    ]:
        with pytest.raises(RefitRefused, match=said):
            house.engine.refit(wrong)
        assert house.live_digests() == held


def test_half_a_version_generates_nothing(house):
    house.load(house.w0)
    first, *_ = house.sender.messages(house.engine.version + 1, house.w1, chunks=3)
    house.engine.refit(first)
    with pytest.raises(GenerationRefused, match="no complete version"):
        house.engine.generate([[5, 6]], [0], TRAINING)
    # The whole version, from its first chunk on, is still welcome.
    assert house.load(house.w1) == house.live_digests()


def test_refit_empties_the_prefix_cache(house):
    """Case 12."""
    house.load(house.w0)
    prompt = prompts(1, 256)
    house.engine.generate(prompt, [0], TRAINING)
    assert house.engine.generate(prompt, [0], TRAINING)[0].cached_tokens >= 128
    changed = dict(house.w0)
    changed["model.layers.0.mlp.down_proj.weight"] = changed["model.layers.0.mlp.down_proj.weight"] * 1.5
    house.load(changed)
    answer = house.engine.generate(prompt, [0], TRAINING)[0]
    assert answer.cached_tokens == 0
    cold = trainer_logprobs(house.spec, changed, house.quantized, [answer.prompt_ids + answer.token_ids], 1.0)[0]
    assert torch.equal(torch.tensor(answer.logprobs), cold[255:])


def test_logprobs_are_those_of_the_sampled_distribution(house):
    """Case 13: logits [2, 1, 0] at temperature 0.5. Layers that add nothing to an embedding of ones, and a head whose
    rows sum to the wanted logits, make them."""
    weights = {name: torch.zeros_like(w) if w.dim() == 2 else torch.ones_like(w) for name, w in house.w0.items()}
    weights["model.embed_tokens.weight"] = torch.ones_like(house.w0["model.embed_tokens.weight"])
    logits = torch.full((256,), -100.0)
    logits[:3] = torch.tensor([2.0, 1.0, 0.0])
    weights["lm_head.weight"] = (logits / 256)[:, None].expand(256, 256).bfloat16()
    house.load(weights)
    sampling = dataclasses.replace(TRAINING, temperature=0.5, max_tokens=8, stop_token_ids=())
    answers = house.engine.generate([[9]] * 64, list(range(64)), sampling)
    got = {token: logp for a in answers for token, logp in zip(a.token_ids, a.logprobs)}
    assert got == {t: pytest.approx(x, abs=1e-4) for t, x in enumerate([-0.1429, -2.1429, -4.1429])}
    with pytest.raises(GenerationRefused) as refused:
        house.engine.generate([[9]], [0], dataclasses.replace(sampling, top_p=0.9, top_k=20))
    assert len(refused.value.problems) == 2


def test_generation_config_in_the_folder_changes_nothing(house):
    """Case 14: the folder asks for top_k=20, top_p=0.8, a repetition penalty, temperature 0.6, and 100 end ids."""
    house.load({name: w * 0.05 if w.dim() == 2 else w for name, w in house.w0.items()})
    answers = house.engine.generate(prompts(64, 4), list(range(64)), TRAINING)
    # The policy is nearly uniform over 256 ids: 64 first tokens out of 20 candidates would be at most 20 different.
    assert len({a.token_ids[0] for a in answers}) > 40
    assert any(100 <= token < 200 for a in answers for token in a.token_ids[:-1])
    assert house.engine.facts.sampling_defaults == {}
    said = house.engine.log.read_text()
    assert "temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0" in said
    assert "repetition_penalty=1.0" in said


def test_ends_of_answers(house):
    """Case 15: the stop token is the last id of an answer that it ended; a cut answer says so and gains nothing."""
    house.load(house.w0)
    free = dataclasses.replace(TRAINING, stop_token_ids=())
    cut = house.engine.generate(prompts(1, 6), [3], free)[0]
    assert (cut.finish_reason, len(cut.token_ids), len(cut.logprobs)) == ("length", 24, 24)
    stop = cut.token_ids[10]
    first = cut.token_ids.index(stop)
    ended = house.engine.generate(prompts(1, 6), [3], dataclasses.replace(free, stop_token_ids=(stop,)))[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids == cut.token_ids[: first + 1]
    assert ended.logprobs == cut.logprobs[: first + 1]
    assert ended.prompt_ids == prompts(1, 6)[0]
    with pytest.raises(GenerationRefused, match="prompt 1: 400 tokens"):
        house.engine.generate([[5], [5] * 400], [0, 0], TRAINING)


def test_digests_name_planted_faults(house):
    weights = dict(house.w0)
    weights["model.layers.1.self_attn.q_proj.weight"] = weights["model.layers.1.self_attn.q_proj.weight"].clone()
    weights["model.layers.1.self_attn.q_proj.weight"][:128] *= 4  # else pow2 scales of neighbouring tiles are equal
    held = house.load(weights)
    down, qkv = "model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.qkv_proj"
    faults = [
        (("flip_bit", down), [down]),
        (("swap_rows", qkv + ".weight", 0, 128, 128), ["model.layers.1.self_attn.q_proj.weight"]),
        (("swap_rows", qkv + ".weight", 512, 768, 128), [f"model.layers.1.self_attn.{p}_proj.weight" for p in "kv"]),
        (("swap_rows", qkv + ".weight_scale_inv", 0, 1, 1), ["model.layers.1.self_attn.q_proj.weight_scale_inv"]),
        (("flip_bit", "lm_head.weight"), ["lm_head.weight"]),
    ]
    for fault, named in faults:
        house.engine.call_workers(*fault)
        assert differing(held, house.live_digests()) == named
        house.engine.call_workers(*fault)  # each fault undoes itself
        assert house.live_digests() == held


def test_killed_engine_is_noticed_and_restarts_cold(house):
    """The fresh process has no weights, and with the same ones gives the same digests, ids and log-probs (case 10)."""
    house.load(house.w0)
    warm_digests = house.load(house.w1, chunks=3)
    warm = house.engine.generate(prompts(4, 20), [0] * 4, GREEDY)
    table = segment_folder() / f"{PREFIX}{house.engine.pid}-table.json"
    table.touch()  # as it has on a GPU, where others map its parameters
    os.kill(house.engine.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDied, match="signal SIGKILL"):
        house.engine.generate(prompts(1, 20), [0], GREEDY)
    assert time.monotonic() - started < 5
    house.engine.restart()
    assert not table.exists()
    with pytest.raises(GenerationRefused, match="refit first"):
        house.engine.generate(prompts(1, 20), [0], GREEDY)
    assert house.engine.refit(house.sender.message(17, house.w1)) == warm_digests
    cold = house.engine.generate(prompts(4, 20), [0] * 4, GREEDY)
    assert [(a.token_ids, a.logprobs) for a in cold] == [(a.token_ids, a.logprobs) for a in warm]
