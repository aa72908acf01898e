"""The planner at real model sizes: every byte once, nothing moved twice, and violations as a table written by hand."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_conversion.errors import LayoutError
from jetrl_conversion.known_models import MODELS, known_config
from jetrl_conversion.layout import Layout, Piece, local_shapes, padded_vocab, pieces
from jetrl_conversion.model_spec import ModelSpec, load_model_spec
from jetrl_conversion.planner import Transfer, plan_reshard, quantized_tensors, violations

HF = Layout("hf")


def spec_of(name: str, layers: int | None = None) -> ModelSpec:
    config = known_config(name)
    return load_model_spec(config if layers is None else config | {"num_hidden_layers": layers})


def covered(rectangles: list[tuple[tuple[int, int], tuple[int, int]]]) -> int:
    """Elements of disjoint rectangles; fails if two overlap. Sweeps over rows: fast for the few of one tensor."""
    total, boxes = 0, sorted((r, r + h, c, c + w) for (r, c), (h, w) in rectangles)
    for i, (top, bottom, left, right) in enumerate(boxes):
        total += (bottom - top) * (right - left)
        for top2, _, left2, right2 in boxes[i + 1 :]:
            if top2 >= bottom:
                break
            assert right2 <= left or left2 >= right, f"rows {top2}.. written twice"
    return total


def lies_in(t: Transfer, p: Piece) -> bool:
    """Whether a transfer reads inside a piece, at the place of the Hugging Face tensor that it claims."""
    (row, col), (rows, cols), (top, left), (height, width) = t.hf_start, t.size, p.hf_start, p.size
    inside = top <= row and row + rows <= top + height and left <= col and col + cols <= left + width
    shift = (t.src_start[0] - p.local_start[0], t.src_start[1] - p.local_start[1])
    return inside and shift == (row - top, col - left)


def check_plan(spec: ModelSpec, src: Layout, dst: Layout) -> None:
    """Every destination element once, from where the source really has it; moved elements equal the overlap."""
    plan = plan_reshard(spec, src, dst)
    there = {}
    for rank in range(src.world):
        for piece in pieces(spec, src, rank):
            there.setdefault((rank, piece.local_name, piece.hf_name), []).append(piece)
    arriving, received = {}, {}
    transfers = plan.transfers
    for t in transfers:
        arriving.setdefault((t.dst_rank, t.dst_local), []).append((t.dst_start, t.size))
        received.setdefault((t.dst_rank, t.hf_name, t.dst_local), []).append((t.hf_start, t.size))
        assert any(lies_in(t, p) for p in there[(t.src_rank, t.src_local, t.hf_name)]), f"{t.src_rank} lacks {t}"
        if t.quantized:
            assert not any((*t.src_start, *t.dst_start, *t.hf_start)[i] % 128 for i in range(6))
    for rank in range(dst.world):
        wanted: dict[str, int] = {}
        by_tensor: dict[tuple[int, str, str], list] = {}
        for piece in pieces(spec, dst, rank):
            wanted[piece.local_name] = wanted.get(piece.local_name, 0) + piece.size[0] * piece.size[1]
            by_tensor.setdefault((rank, piece.hf_name, piece.local_name), []).append((piece.hf_start, piece.size))
        for name, elements in wanted.items():
            assert covered(arriving.pop((rank, name))) == elements, (rank, name)
        for key, boxes in by_tensor.items():
            assert covered(received.pop(key)) == covered(boxes)
    assert not arriving and not received
    sent, moved = dict.fromkeys(range(src.world), 0), dict.fromkeys(range(dst.world), 0)
    for t in transfers:
        sent[t.src_rank] += t.nbytes
        moved[t.dst_rank] += t.nbytes
    assert (plan.bytes_sent(), plan.bytes_received()) == (sent, moved)
    assert plan.sends(src.world - 1) == [t for t in transfers if t.src_rank == src.world - 1]
    assert plan.receives(dst.world - 1) == [t for t in transfers if t.dst_rank == dst.world - 1]


# Four layers keep the number of objects small; every tensor has its real size, and pp = 4 has one layer a stage.
FAMILIES = ["Qwen3-0.6B", "Qwen3-32B", "Qwen2.5-7B", "Qwen2.5-0.5B", "Llama-3.1-8B", "Llama-3.2-1B"]
SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rollout_tp", SIZES)
def test_dense_models_at_every_layout(name, rollout_tp):
    spec = spec_of(name, layers=4)
    dst = Layout("vllm", tp=rollout_tp)
    for tp, pp in itertools.product(SIZES, (1, 2, 4)):
        src = Layout("megatron", tp=tp, pp=pp)
        if any(v.fatal for v in violations(spec, src, dst)):
            with pytest.raises(LayoutError):
                plan_reshard(spec, src, dst)
        else:
            check_plan(spec, src, dst)


@pytest.mark.parametrize("rollout", [Layout("vllm"), Layout("vllm", tp=2, ep=2), Layout("vllm", tp=4),
                                     Layout("vllm", tp=8, ep=8), Layout("vllm", tp=2, ep=8)], ids=str)  # fmt: skip
@pytest.mark.parametrize("ep", SIZES)
def test_experts_at_every_layout(rollout, ep):
    spec = load_model_spec(known_config("Qwen3-30B-A3B") | {"num_hidden_layers": 4, "num_experts": 8})
    for tp, pp in itertools.product(SIZES, (1, 2, 4)):
        check_plan(spec, Layout("megatron", tp=tp, pp=pp, ep=ep), rollout)
    check_plan(spec, Layout("megatron", tp=4, pp=2, ep=ep, etp=1), rollout)


def test_whole_real_models():
    for name, src, dst in [
        ("Qwen3-8B", Layout("megatron", tp=4, pp=2), Layout("vllm", tp=2, dp=2)),
        ("Qwen2.5-1.5B", Layout("megatron", tp=2, pp=4, dp=2), Layout("vllm", tp=4)),
        ("Qwen3-0.6B", Layout("hf"), Layout("megatron", tp=2, pp=2, norm="te")),
        ("Llama-3.2-3B", Layout("vllm", tp=8), Layout("hf")),
    ]:
        check_plan(spec_of(name), src, dst)


def test_replicated_sources_take_turns():
    plan = plan_reshard(spec_of("Qwen3-8B"), Layout("megatron", tp=2, pp=2, dp=4), Layout("vllm", tp=2, dp=4))
    sent = plan.bytes_sent().values()
    assert min(sent) > 0.8 * max(sent)


# name, train, rollout -> {(tensor, engine): reason}; written by hand from the models' sizes, not from the code.
MLP = ("gate_proj", "up_proj", "down_proj")
QKV = ("q_proj", "k_proj", "v_proj")
TABLE = [
    # 18944 / 8 = 2368 = 18.5 tiles, and 28 heads do not divide by 8 at all.
    ("Qwen2.5-7B", {"tp": 8}, {"tp": 8}, {
        **{(m, e): ("2368", False) for m in MLP for e in ("megatron", "vllm")},
        **{(m, e): ("28 attention heads do not divide by tp = 8", True)
           for m in ("q_proj", "k_proj", "v_proj", "o_proj", "q_proj.bias", "k_proj.bias", "v_proj.bias")
           for e in ("megatron", "vllm")}}),
    ("Qwen2.5-7B", {"tp": 4}, {"tp": 4}, {}),
    # One expert is 768 wide: 192 = 1.5 tiles for each of 4 ranks, both for its rows and for its columns.
    ("Qwen3-30B-A3B", {"tp": 4}, {"tp": 4}, {(m, e): ("192", False) for m in MLP for e in ("megatron", "vllm")}),
    ("Qwen3-30B-A3B", {"tp": 4, "ep": 4, "etp": 1}, {"tp": 4, "ep": 4}, {}),
    # head_dim 64: Megatron alternates q, k and v rows of each KV group within a tile; vLLM at TP1 does not.
    ("Llama-3.2-1B", {"tp": 1}, {"tp": 1}, {(m, "megatron"): ("head_dim 64", False) for m in QKV}),
    ("Qwen2.5-0.5B", {"tp": 1}, {"tp": 1}, {(m, "megatron"): ("head_dim 64", False) for m in QKV}),
    # At TP2: q 448 = 3.5 tiles, k and v 64 rows each; o_proj 448 columns; ffn 4864 / 2 = 2432 = 19 tiles is whole.
    ("Qwen2.5-0.5B", {"tp": 2}, {"tp": 2}, {
        **{(m, e): ("head_dim 64", False) for m in QKV for e in ("megatron", "vllm")},
        **{("o_proj", e): ("448", False) for e in ("megatron", "vllm")}}),
    # 8960 / 4 = 2240 = 17.5 tiles.
    ("Qwen2.5-1.5B", {"tp": 4}, {"tp": 1}, {(m, "megatron"): ("2240", False) for m in MLP}),
    ("Qwen2.5-1.5B", {"tp": 2}, {"tp": 2}, {}),
    # 11008 / 8 = 1376 = 10.75 tiles. 2 KV heads at TP8: vLLM replicates them whole; Megatron cuts the 2 x 10 fused
    # heads into 8 runs of 2.5 heads.
    ("Qwen2.5-3B", {"tp": 8}, {"tp": 8}, {
        **{(m, e): ("1376", False) for m in MLP for e in ("megatron", "vllm")},
        **{(m, "megatron"): ("2560/8 = 320", False) for m in QKV}}),
    ("Qwen3-8B", {"tp": 8, "pp": 4}, {"tp": 8}, {}),
    ("Qwen3-32B", {"tp": 8, "pp": 4}, {"tp": 8}, {}),
    ("Qwen3-14B", {"tp": 8}, {"tp": 8}, {}),
    # 9728 / 8 = 1216 = 9.5 tiles.
    ("Qwen3-4B", {"tp": 8}, {"tp": 4}, {(m, "megatron"): ("1216", False) for m in MLP}),
    ("Llama-3.1-8B", {"tp": 8, "pp": 4}, {"tp": 8}, {}),
]  # fmt: skip


@pytest.mark.parametrize("name, train, rollout, expected", TABLE, ids=[f"{t[0]}-{t[1]}-{t[2]}" for t in TABLE])
def test_violations(name, train, rollout, expected):
    spec = spec_of(name)
    src, dst = Layout("megatron", **train), Layout("vllm", **rollout)
    found = {}
    for v in violations(spec, src, dst):
        tensor = v.hf_name.removesuffix(".weight").split(".")
        short = ".".join(tensor[-2:]) if tensor[-1] == "bias" else tensor[-1]
        assert (short, v.layout.split("(")[0]) not in found
        found[(short, v.layout.split("(")[0])] = (v.reason, v.fatal)
    assert set(found) == set(expected)
    for key, (text, fatal) in expected.items():
        assert text in found[key][0] and found[key][1] == fatal, found[key]
    # What breaks a tile on one side is BF16 on both.
    kept = {n.removesuffix(".weight").split(".")[-1] for n, info in spec.tensors().items() if info.quantized}
    kept -= {n.removesuffix(".weight").split(".")[-1] for n in quantized_tensors(spec, src, dst)}
    assert kept == {tensor for (tensor, _), (_, fatal) in expected.items() if not fatal}


def test_kv_heads_that_tp_does_not_divide():
    config = known_config("Qwen3-8B") | {"num_attention_heads": 12, "num_key_value_heads": 6}
    for kind in ("megatron", "vllm"):
        found = {v.hf_name.split(".")[-2]: v for v in violations(load_model_spec(config), Layout(kind, tp=4))}
        assert set(found) == {"k_proj", "v_proj"} and all(v.fatal for v in found.values())
        assert "6 KV heads neither divide by tp = 4 nor 4 by 6" in found["k_proj"].reason
        with pytest.raises(LayoutError, match=r"k_proj(.|\n)*v_proj"):
            pieces(load_model_spec(config), Layout(kind, tp=4), 0)


def test_all_impossible_divisions_at_once():
    spec = spec_of("Qwen3-30B-A3B")
    names = [v.hf_name for v in violations(spec, Layout("megatron", tp=3, pp=5, ep=7)) if v.fatal]
    assert {"model.layers.*", "model.layers.*.mlp.experts.*", "model.layers.*.self_attn.q_proj.weight"} <= set(names)
    with pytest.raises(LayoutError) as error:
        plan_reshard(spec, Layout("megatron", tp=3, pp=5, ep=7), HF)
    assert len(error.value.problems) == len(names) > 5


def test_replicated_kv_heads_reach_each_rank_once():
    spec = spec_of("Qwen2.5-1.5B", layers=1)  # 2 KV heads on 4 ranks: ranks 0, 1 hold head 0, ranks 2, 3 head 1
    name = "model.layers.0.self_attn.k_proj.weight"
    for rank in range(4):
        (piece,) = [p for p in pieces(spec, Layout("vllm", tp=4), rank) if p.hf_name == name]
        assert (piece.hf_start, piece.size) == ((rank // 2 * 128, 0), (128, 1536))
        assert piece.local_start == (3 * 128, 0)  # after the rank's 3 query heads


def test_vocabulary_padding():
    spec = spec_of("Qwen3-0.6B")  # 151936 = 64 * 2374: vLLM pads nothing, not even for 8 ranks
    assert padded_vocab(spec, Layout("vllm", tp=8)) == 151936
    assert padded_vocab(spec, Layout("megatron", tp=8)) == 151936
    assert padded_vocab(spec, Layout("megatron", tp=8, vocab_multiple=128)) == 152576
    odd = load_model_spec(known_config("Qwen3-0.6B") | {"vocab_size": 1000})
    assert local_shapes(odd, Layout("vllm", tp=4), 3)["model.embed_tokens.weight"] == (256, 1024)
    last = [p for p in pieces(odd, Layout("vllm", tp=4), 3) if p.local_name == "model.embed_tokens.weight"]
    assert [(p.hf_start, p.size) for p in last] == [((768, 0), (232, 1024))]


def test_tied_head_on_the_last_stage():
    spec = spec_of("Qwen3-0.6B")
    first, last = (pieces(spec, Layout("megatron", pp=2), rank) for rank in (0, 1))
    assert [p.local_name for p in first if "embed" in p.hf_name] == ["embedding.word_embeddings.weight"]
    assert [p.local_name for p in last if "embed" in p.hf_name] == ["output_layer.weight"]
    assert [p.local_name for p in pieces(spec, Layout("megatron"), 0) if "embed" in p.hf_name] == [
        "embedding.word_embeddings.weight"
    ]


def test_keep_bf16_takes_what_is_fused_along():
    spec = spec_of("Qwen3-0.6B")
    held = quantized_tensors(spec, HF, keep_bf16=["*.layers.3.self_attn.k_proj.weight", "*.down_proj.weight"])
    gone = {n for n, info in spec.tensors().items() if info.quantized} - held
    assert {n for n in gone if "down_proj" not in n} == {
        f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv"
    }
    assert sum("down_proj" in n for n in gone) == 28


def test_plan_of_the_largest_model_is_quick():
    spec = spec_of("Qwen3-235B-A22B")
    src, dst = Layout("megatron", tp=4, pp=2, ep=8, etp=1, dp=16), Layout("vllm", tp=8, ep=8, dp=16)
    assert (src.world, dst.world) == (256, 128)
    started = time.process_time()
    plan = plan_reshard(spec, src, dst)
    received, sent = plan.bytes_received(), plan.bytes_sent()
    assert time.process_time() - started < 5
    assert sum(received.values()) == sum(sent.values()) > 16 * 230e9
    assert violations(spec, src, dst) == []


@st.composite
def small_models(draw: st.DrawFn) -> ModelSpec:
    kv = draw(st.sampled_from([1, 2, 3, 4]))
    config = {
        "hidden_size": draw(st.sampled_from([128, 192, 256])),
        "num_hidden_layers": draw(st.sampled_from([1, 2, 4])),
        "num_key_value_heads": kv,
        "num_attention_heads": kv * draw(st.sampled_from([1, 2, 3, 4])),
        "head_dim": draw(st.sampled_from([32, 64, 128, 256])),
        "intermediate_size": draw(st.sampled_from([128, 256, 384, 512, 1024])),
        "vocab_size": draw(st.integers(100, 700)),
        "tie_word_embeddings": draw(st.booleans()),
        "architectures": [draw(st.sampled_from(sorted(
            {"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"})))],
    }  # fmt: skip
    if "Moe" in config["architectures"][0]:
        config |= {"num_experts": draw(st.sampled_from([2, 4, 8])), "num_experts_per_tok": 2,
                   "moe_intermediate_size": draw(st.sampled_from([64, 128, 256])),
                   "mlp_only_layers": draw(st.sampled_from([[], [0]]))}  # fmt: skip
    return load_model_spec(config)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    kind = draw(st.sampled_from(["hf", "megatron", "vllm"]))
    dp = draw(st.sampled_from([1, 1, 2]))
    if kind == "hf":
        return Layout("hf", dp=dp)
    tp, ep = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2, 4]))
    if kind == "vllm":
        return Layout("vllm", tp=tp, ep=tp * ep if ep > 1 else 1, dp=dp)
    return Layout("megatron", tp=tp, pp=draw(st.sampled_from([1, 2, 4])), ep=ep, dp=dp,
                  etp=draw(st.sampled_from([None, None, 1])), norm=draw(st.sampled_from(["local", "te"])),
                  experts=draw(st.sampled_from(["sequential", "grouped"])),
                  vocab_multiple=draw(st.sampled_from([1, 64])))  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(spec=small_models(), src=layouts(), dst=layouts())  # pyright: ignore[reportCallIssue]
def test_any_plan(spec, src, dst):
    fatal = [v for v in violations(spec, src, dst) if v.fatal]
    if fatal:
        with pytest.raises(LayoutError) as error:
            plan_reshard(spec, src, dst)
        assert error.value.problems
        return
    check_plan(spec, src, dst)
    fits = {t.hf_name for t in plan_reshard(spec, src, dst).transfers if t.quantized}
    assert fits <= quantized_tensors(spec, src, dst)


@settings(max_examples=100, deadline=None)
@given(spec=small_models(), layout=layouts())  # pyright: ignore[reportCallIssue]
def test_pieces_fill_the_local_parameters(spec, layout):
    if any(v.fatal for v in violations(spec, layout)):
        return
    padded = {"embedding.word_embeddings.weight", "output_layer.weight", "model.embed_tokens.weight", "lm_head.weight"}
    for rank in range(layout.world):
        filled: dict[str, list] = {}
        for piece in pieces(spec, layout, rank):
            filled.setdefault(piece.local_name, []).append((piece.local_start, piece.size))
        for name, shape in local_shapes(spec, layout, rank).items():
            elements = 1
            for n in shape:
                elements *= n
            got = covered(filled.pop(name, []))
            assert got == elements or (name in padded and got < elements), name
        assert not filled


def test_every_released_model_has_the_right_number_of_parameters():
    billions = {"Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "Qwen3-14B": 14.77,
                "Qwen3-32B": 32.76, "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09,
                "Qwen2.5-7B": 7.62, "Qwen2.5-14B": 14.77, "Qwen2.5-32B": 32.76, "Qwen2.5-72B": 72.7,
                "Llama-3.1-8B": 8.03, "Llama-3.1-70B": 70.55, "Llama-3.2-1B": 1.236, "Llama-3.2-3B": 3.21,
                "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235.1}  # fmt: skip
    assert set(billions) == set(MODELS)
    for name, expected in billions.items():
        total = 0
        for info in spec_of(name).tensors().values():
            size = 1
            for n in info.shape:
                size *= n
            total += size
        assert total / 1e9 == pytest.approx(expected, rel=0.005), name
