"""Faults that users of comparable software reported, as small inputs with the right answer: conversion, resharding."""

from __future__ import annotations

import pytest
import torch

from jetrl_conversion import convert
from jetrl_conversion.errors import CheckpointError, ConversionError
from jetrl_conversion.layout import Layout, local_shapes, pieces
from jetrl_conversion.model_spec import ModelSpec, load_model_spec
from jetrl_conversion.planner import Plan, plan_reshard, violations
from jetrl_conversion.random_checkpoint import write_random_checkpoint
from jetrl_conversion.safetensors_io import HFFolderReader, HFFolderWriter
from jetrl_conversion.sources import open_source
from jetrl_conversion.verify import compare
from jetrl_kernels.quant_weight import dequant_weight, quant_weight

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM",
                 "qwen3_moe": "Qwen3MoeForCausalLM"}  # fmt: skip


def config_of(family: str, **changes) -> dict:
    config = {"architectures": [ARCHITECTURES[family]], "model_type": family, "hidden_size": 256,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
              "intermediate_size": 512, "vocab_size": 200, "tie_word_embeddings": False,
              "max_position_embeddings": 128}  # fmt: skip
    if family == "qwen3_moe":
        config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return config | changes


def write(path, config: dict, values: dict[str, torch.Tensor] | None = None, dtype=torch.bfloat16) -> None:
    """A checkpoint of zeros, but for `values`."""
    spec = load_model_spec(config)
    tensors = {name: (dtype, info.shape) for name, info in spec.tensors().items()}
    with HFFolderWriter(path, tensors, config) as writer:
        for name, (_, shape) in tensors.items():
            writer.write(name, (0, 0), (values or {}).get(name, torch.zeros(shape)).to(dtype))


def whole(folder) -> dict[str, torch.Tensor]:
    reader = HFFolderReader(folder)
    return {name: reader.whole(name) for name in reader.entries}


def move(plan: Plan, sources: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Carry a plan out on tensors in memory: `sources[rank][local name]` -> the same for the destination."""
    shapes = [local_shapes(plan.spec, plan.dst, rank) for rank in range(plan.dst.world)]
    some = next(iter(sources[0].values()))
    out = [{name: torch.full(shape, -1, dtype=some.dtype) for name, shape in held.items()} for held in shapes]
    for t in plan.transfers:
        source, target = table(sources[t.src_rank][t.src_local]), table(out[t.dst_rank][t.dst_local])
        (sr, sc), (dr, dc), (rows, cols) = t.src_start, t.dst_start, t.size
        target[dr : dr + rows, dc : dc + cols] = source[sr : sr + rows, sc : sc + cols]
    return out


def table(t: torch.Tensor) -> torch.Tensor:
    return t.view(-1, t.shape[-1]) if t.dim() > 1 else t.view(-1, 1)


def spread(spec: ModelSpec, layout: Layout, full: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return move(plan_reshard(spec, Layout("hf"), layout, fp8=False), [full])


# 1. and 2. Zero and tiny tiles, sides that 128 does not divide, through the file format.
def test_odd_shapes_and_tiny_tiles(tmp_path):
    config = config_of("llama", hidden_size=320, head_dim=64, num_attention_heads=2, num_key_value_heads=2,
                       intermediate_size=256, num_hidden_layers=1)  # fmt: skip
    down = torch.zeros(320, 256)
    down[0, 0], down[128:256, 128:], down[256:, :128] = 1.0, 1e-37, 1e-40
    name = "model.layers.0.mlp.down_proj.weight"
    write(tmp_path / "hf", config, {name: down})
    convert.hf_to_fp8(tmp_path / "hf", tmp_path / "fp8")
    held = whole(tmp_path / "fp8")
    assert held["model.layers.0.self_attn.q_proj.weight_scale_inv"].shape == (1, 3)
    codes, scale = held[name], held[name + "_scale_inv"]
    assert codes.shape == (320, 256) and scale.shape == (3, 2)
    assert bool((torch.isfinite(scale) & (scale > 0)).all())
    assert not bool(codes.view(torch.uint8)[down == 0].any())
    convert.fp8_to_hf(tmp_path / "fp8", tmp_path / "back")
    back = whole(tmp_path / "back")[name].float()
    assert bool(torch.isfinite(back).all())
    assert float((back[128:] - down.bfloat16().float()[128:]).abs().max()) <= 1.01e-37
    # gate and up are fused in vLLM: 192 rows each would not start on the grid, so they stay BF16 with their reason.
    odd = config_of("llama", intermediate_size=192)
    write(tmp_path / "odd", odd)
    convert.hf_to_fp8(tmp_path / "odd", tmp_path / "odd8")
    assert "model.layers.0.mlp.gate_proj.weight_scale_inv" not in HFFolderReader(tmp_path / "odd8").entries
    assert "192" in (tmp_path / "odd8" / "README.md").read_text()


# 3. FP8 is never requantized, nor are scales rounded under existing codes.
def test_fp8_is_not_converted_to_another_policy(tmp_path):
    write_random_checkpoint(tmp_path / "hf", config_of("qwen3"))
    convert.hf_to_fp8(tmp_path / "hf", tmp_path / "fp8", scales="fp32")
    with pytest.raises(ConversionError, match="is FP8 already and FP8 is never requantized"):
        convert.hf_to_fp8(tmp_path / "fp8", tmp_path / "again", scales="pow2")
    with pytest.raises(ConversionError, match="never requantized"):
        convert.hf_to_megatron(tmp_path / "fp8", tmp_path / "megatron")
    assert not (tmp_path / "again").exists() and not (tmp_path / "megatron").exists()


# 4. A shard that straddles a tile.
def test_qkv_rows_that_straddle_a_tile():
    spec = load_model_spec(config_of("qwen2", num_attention_heads=14, num_key_value_heads=2, head_dim=64))
    at = {p.hf_name.split(".")[-2]: p.local_start[0] // 128 for p in pieces(spec, Layout("vllm"), 0)
          if p.local_name == "model.layers.0.self_attn.qkv_proj.weight"}  # fmt: skip
    assert at == {"q_proj": 0, "k_proj": 7, "v_proj": 8}
    assert not violations(spec, Layout("vllm"))
    for heads in (14, 12):
        spec = load_model_spec(config_of("qwen2", num_attention_heads=heads, num_key_value_heads=2, head_dim=64))
        lines = [str(v) for v in violations(spec, Layout("vllm", tp=2)) if "k_proj" in v.hf_name]
        assert len(lines) == 1 and "self_attn.k_proj.weight" in lines[0]
        assert "vllm(tp=2)" in lines[0] and "tile row" in lines[0]


# 5. QKV interleave with bytes.
def test_qkv_bytes_move_exactly_at_head_dim_128():
    spec = load_model_spec(config_of("qwen2", num_hidden_layers=1))
    torch.manual_seed(0)
    weights = {"q": torch.randn(512, 256), "k": torch.randn(256, 256), "v": torch.randn(256, 256)}
    weights["k"][128:] *= 16
    weights["v"][128:] *= 16
    full = {name: torch.zeros(info.shape) for name, info in spec.tensors().items()}
    for part, weight in weights.items():
        full[f"model.layers.0.self_attn.{part}_proj.weight"] = weight
    for tp in (1, 2):
        layout = Layout("megatron", tp=tp)
        plan = plan_reshard(spec, Layout("hf"), layout)
        fused = [held["decoder.layers.0.self_attention.linear_qkv.weight"] for held in spread(spec, layout, full)]
        codes = {n: quant_weight(w).codes for n, w in full.items() if w.dim() == 2}
        scales = {n: quant_weight(w).scale for n, w in full.items() if w.dim() == 2}
        for rank in range(tp):
            rows = 1024 // tp
            got_codes, got_scale = torch.zeros(rows, 256, dtype=torch.uint8), torch.zeros(rows // 128, 2)
            for t in plan.receives(rank):
                if t.dst_local.endswith("linear_qkv.weight"):
                    assert t.quantized
                    (sr, _), (dr, _), (n, _) = t.src_start, t.dst_start, t.size
                    got_codes[dr : dr + n] = codes[t.hf_name].view(torch.uint8)[sr : sr + n]
                    (sr, _), (dr, _), (n, _) = t.scale
                    got_scale[dr : dr + n] = scales[t.hf_name][sr : sr + n]
            want = quant_weight(fused[rank])  # what the trainer quantizes: the fused tensor
            assert torch.equal(got_codes, want.codes.view(torch.uint8)) and torch.equal(got_scale, want.scale)


def test_qkv_bytes_cannot_move_at_head_dim_64():
    spec = load_model_spec(config_of("qwen2", head_dim=64, num_hidden_layers=1))
    plan = plan_reshard(spec, Layout("hf"), Layout("megatron"))
    qkv = [t for t in plan.transfers if "linear_qkv.weight" in t.dst_local]
    assert qkv and not any(t.quantized for t in qkv)
    # What it would cost to move the bytes anyway: the scale of a tile that holds rows of two heads is wrong for one.
    k = torch.randn(128, 256)
    k[64:] *= 16
    scale = quant_weight(k).scale
    alone = quant_weight(k[:64])
    wrong = dequant_weight(alone.codes, scale[:1], torch.float32)
    assert float((wrong - k[:64]).norm() / k[:64].norm()) > 0.9


def test_qkv_bias_follows_the_same_permutation():
    config = config_of("qwen2", head_dim=1, num_hidden_layers=1, hidden_size=4)
    spec = load_model_spec(config)
    full = {name: torch.zeros(info.shape) for name, info in spec.tensors().items()}
    for part, values in {"q": [1, 2, 3, 4], "k": [10, 11], "v": [20, 21]}.items():
        full[f"model.layers.0.self_attn.{part}_proj.bias"] = torch.tensor(values, dtype=torch.float32)
    name = "decoder.layers.0.self_attention.linear_qkv.bias"
    assert spread(spec, Layout("megatron"), full)[0][name].tolist() == [1, 2, 10, 20, 3, 4, 11, 21]
    assert [r[name].tolist() for r in spread(spec, Layout("megatron", tp=2), full)] == [
        [1, 2, 10, 20],
        [3, 4, 11, 21],
    ]
    vllm = [r["model.layers.0.self_attn.qkv_proj.bias"].tolist() for r in spread(spec, Layout("vllm", tp=4), full)]
    assert vllm == [[1, 10, 20], [2, 10, 20], [3, 11, 21], [4, 11, 21]]


# 6. Tied embeddings.
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(tmp_path, tied):
    config = config_of("qwen3", tie_word_embeddings=tied)
    same = torch.randn(200, 256)
    write(tmp_path / "hf", config, {"model.embed_tokens.weight": same, "lm_head.weight": same})
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "mg")
    convert.megatron_to_hf(tmp_path / "mg", tmp_path / "back")
    convert.megatron_to_fp8(tmp_path / "mg", tmp_path / "fp8")
    # Untied stays untied even where head and embedding are equal; tied holds no head at all.
    assert list(whole(tmp_path / "hf")) == list(whole(tmp_path / "back"))
    assert ("lm_head.weight" in whole(tmp_path / "back")) == (not tied)
    assert ("lm_head.weight" in whole(tmp_path / "fp8")) == (not tied)
    assert "lm_head.weight_scale_inv" not in whole(tmp_path / "fp8")
    assert open_source(tmp_path / "back").spec.tied == tied


def test_tied_folder_that_stores_its_head(tmp_path):
    config = config_of("qwen3", tie_word_embeddings=True)
    spec = load_model_spec(config)
    for name, head in (("equal", 1.0), ("random", 2.0)):
        tensors = {n: (torch.bfloat16, info.shape) for n, info in spec.tensors().items()}
        tensors["lm_head.weight"] = (torch.bfloat16, (200, 256))
        with HFFolderWriter(tmp_path / name, tensors, config) as writer:
            for n, (dtype, shape) in tensors.items():
                writer.write(n, (0, 0), torch.full(shape, head if n == "lm_head.weight" else 1.0, dtype=dtype))
    convert.hf_to_megatron(tmp_path / "equal", tmp_path / "mg")
    convert.megatron_to_hf(tmp_path / "mg", tmp_path / "back")
    assert "lm_head.weight" not in whole(tmp_path / "back")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        convert.hf_to_megatron(tmp_path / "random", tmp_path / "mg2")


# 7. Gate and up at TP > 1.
def test_gate_up_at_tp2():
    spec = load_model_spec(config_of("llama", hidden_size=4, head_dim=4, intermediate_size=8, num_hidden_layers=1))
    full = {name: torch.zeros(info.shape) for name, info in spec.tensors().items()}
    full["model.layers.0.mlp.gate_proj.weight"] = torch.arange(8.0)[:, None].expand(8, 4)
    full["model.layers.0.mlp.up_proj.weight"] = torch.arange(100.0, 108)[:, None].expand(8, 4)
    for layout, name in ((Layout("megatron", tp=2), "decoder.layers.0.mlp.linear_fc1.weight"),
                         (Layout("vllm", tp=2), "model.layers.0.mlp.gate_up_proj.weight")):  # fmt: skip
        ranks = spread(spec, layout, full)
        assert [r[name][:, 0].tolist() for r in ranks] == [
            [0, 1, 2, 3, 100, 101, 102, 103],
            [4, 5, 6, 7, 104, 105, 106, 107],
        ]
        (merged,) = move(plan_reshard(spec, layout, Layout("megatron"), fp8=False), ranks)
        assert merged["decoder.layers.0.mlp.linear_fc1.weight"][:, 0].tolist() == [*range(8), *range(100, 108)]


# 8. Experts.
def test_every_expert_once():
    spec = load_model_spec(config_of("qwen3_moe", num_hidden_layers=1))
    full = {name: torch.zeros(info.shape) for name, info in spec.tensors().items()}
    for name in full:
        if ".experts." in name:
            full[name] += int(name.split(".experts.")[1].split(".")[0])
    four = spread(spec, Layout("megatron", ep=4), full)
    two = move(plan_reshard(spec, Layout("megatron", ep=4), Layout("megatron", ep=2), fp8=False), four)
    for ranks, each in ((four, 2), (two, 4)):
        for rank, held in enumerate(ranks):
            experts = {n: v for n, v in held.items() if "local_experts" in n}
            assert len(experts) == 2 * each
            for name, value in experts.items():
                local = int(name.split("local_experts.")[1].split(".")[0])
                assert bool((value == rank * each + local).all()), name
    (back,) = move(plan_reshard(spec, Layout("megatron", ep=2), Layout("hf"), fp8=False), two)
    assert set(back) == set(full) and all(torch.equal(back[n], full[n]) for n in full)
    stacked = move(plan_reshard(spec, Layout("megatron", ep=2), Layout("vllm", tp=2, ep=4), fp8=False), two)
    name = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert [[int(e[0, 0]) for e in held[name]] for held in stacked] == [[0, 1], [2, 3], [4, 5], [6, 7]]


# Round trips.
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_round_trips(tmp_path, family, scales):
    write_random_checkpoint(tmp_path / "hf", config_of(family), shard_bytes=1 << 20)
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "mg")
    convert.megatron_to_hf(tmp_path / "mg", tmp_path / "hf2")
    assert compare(open_source(tmp_path / "hf"), open_source(tmp_path / "hf2")).equal
    assert compare(open_source(tmp_path / "mg"), open_source(tmp_path / "hf2")).equal
    convert.hf_to_fp8(tmp_path / "hf2", tmp_path / "fp8", scales=scales)
    convert.megatron_to_fp8(tmp_path / "mg", tmp_path / "fp8_direct", scales=scales)
    a, b = whole(tmp_path / "fp8"), whole(tmp_path / "fp8_direct")
    assert list(a) == list(b)
    assert all(torch.equal(a[n].flatten().view(torch.uint8), b[n].flatten().view(torch.uint8)) for n in a)
    source = whole(tmp_path / "hf")
    fp8 = [n for n in a if n + "_scale_inv" in a]
    assert fp8 == [n for n, info in load_model_spec(tmp_path / "hf").tensors().items() if info.quantized]
    for name in fp8:
        want = quant_weight(source[name], scales)
        assert torch.equal(a[name].view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(a[name + "_scale_inv"], want.scale)
    convert.fp8_to_hf(tmp_path / "fp8", tmp_path / "hf3")
    back = whole(tmp_path / "hf3")
    assert list(back) == list(source)
    for name in source:
        want = dequant_weight(a[name], a[name + "_scale_inv"]) if name in fp8 else source[name]
        assert torch.equal(back[name], want), name
    assert open_source(tmp_path / "hf3").policy is None


def test_dense_and_expert_layers_mixed(tmp_path):
    config = config_of("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[1], decoder_sparse_step=1)
    write_random_checkpoint(tmp_path / "hf", config)
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "mg")
    convert.megatron_to_hf(tmp_path / "mg", tmp_path / "hf2")
    assert compare(open_source(tmp_path / "hf"), open_source(tmp_path / "hf2")).equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(tmp_path, dtype):
    write_random_checkpoint(tmp_path / "hf", config_of("llama"), dtype=dtype)
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "mg")
    convert.megatron_to_hf(tmp_path / "mg", tmp_path / "hf2")
    assert compare(open_source(tmp_path / "hf"), open_source(tmp_path / "hf2")).equal
    convert.hf_to_fp8(tmp_path / "hf", tmp_path / "fp8")  # always through BF16
    name = "model.layers.1.mlp.up_proj.weight"
    want = quant_weight(whole(tmp_path / "hf")[name].bfloat16())
    assert torch.equal(whole(tmp_path / "fp8")[name].view(torch.uint8), want.codes.view(torch.uint8))


def test_keep_bf16_and_layouts(tmp_path):
    write_random_checkpoint(tmp_path / "hf", config_of("llama", intermediate_size=640))
    convert.hf_to_fp8(tmp_path / "hf", tmp_path / "fp8", keep_bf16=["model.layers.0.self_attn.k_proj.weight"],
                      layouts=[Layout("megatron", tp=2)])  # fmt: skip
    entries = HFFolderReader(tmp_path / "fp8").entries
    kept = {n for n in load_model_spec(tmp_path / "hf").tensors() if "proj" in n and n + "_scale_inv" not in entries}
    assert kept == {f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"} | {
        f"model.layers.{i}.mlp.{p}_proj.weight" for i in (0, 1) for p in ("gate", "up", "down")
    }
    skipped = open_source(tmp_path / "fp8").spec.config["quantization_config"]["modules_to_not_convert"]
    assert set(skipped) == {"lm_head"} | {n.removesuffix(".weight") for n in kept}
    card = (tmp_path / "fp8" / "README.md").read_text()
    assert "640/2 = 320" in card and "VLLM_USE_DEEP_GEMM_E8M0" in card and "pow2" in card
    with pytest.raises(ConversionError, match="matches no tensor"):
        convert.hf_to_fp8(tmp_path / "hf", tmp_path / "no", keep_bf16=["*.kproj.*"])
