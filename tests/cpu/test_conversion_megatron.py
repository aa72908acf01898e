"""Megatron-core itself loads and saves what the converter reads and writes: every family, TP 1, TP 2 x PP 2, EP 2.

The file is its own worker: torchrun starts it on four gloo ranks once for all cases, the tests read what it reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jetrl_conversion import convert
from jetrl_conversion.model_spec import ModelSpec, load_model_spec
from jetrl_conversion.random_checkpoint import write_random_checkpoint
from jetrl_conversion.safetensors_io import HFFolderReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Ends the workers too, also when this process is gone.
LIMIT = ["timeout", "--kill-after=10", "560"]
BASE = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 512, "vocab_size": 331, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
CONFIGS = {
    "qwen3_tied": BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_untied": BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False},
    "qwen2": BASE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False},
    "llama": BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True,
                     "rope_scaling": LLAMA3_ROPE},
    "qwen3_moe": BASE | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
                         "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True,
                         "tie_word_embeddings": False},
}  # fmt: skip
WORLDS = [{"tp": 1, "pp": 1}, {"tp": 2, "pp": 2}]
MORE = [("qwen2", {"tp": 2, "pp": 1}), ("qwen3_untied", {"tp": 4, "pp": 1}), ("qwen3_moe", {"tp": 1, "pp": 1, "ep": 2})]
RANKS = 4
# A save starts a process on every rank: only where the checkpoint is cut in each way.
SAVED = [*((name, WORLDS[1]) for name in CONFIGS), MORE[2]]
TOKENS = torch.arange(3, 3 + 48).remainder(331).view(2, 24)


def cases() -> list[tuple[str, dict[str, int]]]:
    return [(name, world) for name in CONFIGS for world in WORLDS] + MORE


def label(name: str, world: dict[str, int]) -> str:
    return name + "".join(f"_{key}{value}" for key, value in world.items())


def build(spec: ModelSpec, world: dict[str, int], vocab: int):
    """A GPTModel of Megatron's own local layer spec, FP32."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    experts = spec.num_experts or None
    config = TransformerConfig(
        num_layers=spec.num_layers, hidden_size=spec.hidden_size, num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads, kv_channels=spec.head_dim, ffn_hidden_size=spec.ffn,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias, normalization="RMSNorm", layernorm_epsilon=spec.rms_eps,
        qk_layernorm=spec.qk_norm, use_cpu_initialization=True, perform_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False, params_dtype=torch.float32, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=world["tp"], pipeline_model_parallel_size=world["pp"],
        expert_model_parallel_size=world.get("ep", 1), num_moe_experts=experts,
        moe_ffn_hidden_size=spec.moe_ffn or None, moe_router_topk=spec.experts_per_token or 2,
        moe_router_pre_softmax=False, moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
    )  # fmt: skip
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=spec.qk_norm, normalization="RMSNorm"
        ),
        vocab_size=vocab,
        max_sequence_length=256,
        position_embedding_type="rope",
        rotary_base=int(spec.rope_theta),
        rope_scaling=spec.rope_scaling is not None,
        rope_scaling_factor=(spec.rope_scaling or {}).get("factor", 8.0),
        share_embeddings_and_output_weights=spec.tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def run_case(root: Path, name: str, world: dict[str, int]) -> list[str]:
    """Load the converted checkpoint with Megatron and hold every parameter against the Hugging Face folder; save it
    again with Megatron. Returns what is wrong."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from jetrl_conversion.layout import Layout, local_shapes, padded_vocab, pieces

    parallel_state.initialize_model_parallel(
        world["tp"], world["pp"], expert_model_parallel_size=world.get("ep", 1), create_gloo_process_groups=True
    )
    model_parallel_cuda_manual_seed(1)
    rank = torch.distributed.get_rank()
    spec, reader = load_model_spec(root / name), HFFolderReader(root / name)
    layout = Layout("megatron", tp=world["tp"], pp=world["pp"], ep=world.get("ep", 1))
    model = build(spec, world, padded_vocab(spec, layout))
    strict = dist_checkpointing.validation.StrictHandling.RETURN_ALL
    state, missing, unexpected = dist_checkpointing.load(
        model.sharded_state_dict(), str(root / f"{name}_megatron"), strict=strict
    )
    # Before experts both layer specs' names of the norm are stored; each model reads its own.
    missing = {key for key in missing if "pre_mlp_layernorm" not in key}
    problems = [f"missing {sorted(missing)}, unexpected {sorted(unexpected)}"] if missing or unexpected else []
    model.load_state_dict(state)
    params = dict(model.named_parameters())
    at = rank % layout.world
    shapes = local_shapes(spec, layout, at)
    if {key: tuple(p.shape) for key, p in params.items()} != shapes:
        problems.append(f"parameters {sorted(set(params) ^ set(shapes))} or shapes differ")
    for piece in pieces(spec, layout, at):
        (row, col), (rows, cols) = piece.local_start, piece.size
        local = params[piece.local_name].detach()
        local = local.reshape(local.shape[0], -1)[row : row + rows, col : col + cols]
        if not torch.equal(local, reader.read(piece.hf_name, piece.hf_start, piece.size).float()):
            problems.append(f"{piece.local_name} is not {piece.hf_name} at {piece.hf_start}")
    if world["pp"] == 1 and "ep" not in world:
        problems += check_logits(root, name, spec, model, world)
    if (name, world) in SAVED:
        saved = root / f"saved_{label(name, world)}"
        if rank == 0:
            saved.mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save(model.bfloat16().sharded_state_dict(), str(saved))
    parallel_state.destroy_model_parallel()
    return problems


def check_logits(root: Path, name: str, spec: ModelSpec, model, world: dict[str, int]) -> list[str]:
    expected = torch.load(root / f"{name}_logits.pt")
    length = TOKENS.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    positions = torch.arange(length).expand_as(TOKENS)
    with torch.no_grad():
        found = model.eval()(TOKENS, positions, mask, runtime_gather_output=True)[..., : spec.vocab_size]
    error = float((found - expected).abs().max())
    return [] if error < 2e-4 else [f"logits differ from transformers' by {error}"]


def worker(root: Path) -> None:
    from jetrl_megatron.megatron import patches

    torch.set_num_threads(1)
    patches.enable_cpu()
    torch.distributed.init_process_group("gloo")
    report = {}
    for name, world in cases():
        report[label(name, world)] = run_case(root, name, world)
    (root / f"report_{torch.distributed.get_rank()}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


def transformers_logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Checkpoints of all families, converted; then loaded, checked and saved by four Megatron ranks."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, config in CONFIGS.items():
        write_random_checkpoint(folder / name, config)
        convert.hf_to_megatron(folder / name, folder / f"{name}_megatron")
        torch.save(transformers_logits(folder / name), folder / f"{name}_logits.pt")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER_"))}
    command = [*LIMIT, sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone",
               __file__, str(folder)]  # fmt: skip
    done = subprocess.run(command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("name, world", cases(), ids=[label(*case) for case in cases()])
def test_megatron_loads_our_checkpoint(root, name, world):
    for rank in range(RANKS):
        assert json.loads((root / f"report_{rank}.json").read_text())[label(name, world)] == []


@pytest.mark.parametrize("name, world", SAVED, ids=[label(*case) for case in SAVED])
def test_we_read_megatrons_checkpoint(root, name, world, tmp_path):
    convert.megatron_to_hf(root / f"saved_{label(name, world)}", tmp_path / "hf", config=root / name)
    first, back = HFFolderReader(root / name), HFFolderReader(tmp_path / "hf")
    assert list(first.entries) == list(back.entries)
    for key in first.entries:
        ours, theirs = first.whole(key), back.whole(key)
        assert torch.equal(ours, theirs.to(ours.dtype)), key
    logits = transformers_logits(root / name, torch.bfloat16)
    assert torch.equal(logits, transformers_logits(tmp_path / "hf", torch.bfloat16))


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
