"""Stock transformers: loads block-FP8 folders by dequantizing, writes folders that we read, gives the same logits."""

from __future__ import annotations

import pytest
import torch

from jetrl_conversion import convert
from jetrl_conversion.random_checkpoint import write_random_checkpoint
from jetrl_conversion.sources import open_source
from jetrl_conversion.verify import compare

BASE = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 512, "vocab_size": 331, "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
CONFIGS = {
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2": BASE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 64},
    "llama": BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": LLAMA3_ROPE},
    "qwen3_moe": BASE | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
                         "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
}  # fmt: skip
TOKENS = torch.arange(3, 3 + 48).remainder(331).view(2, 24)


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def logits(folder) -> torch.Tensor:
    with torch.no_grad():
        return load(folder)(TOKENS).logits


@pytest.mark.parametrize("family", CONFIGS)
def test_fp8_folder_loads_in_transformers(tmp_path, family):
    """transformers dequantizes on a CPU: exactly the logits of our own dequantized folder."""
    pytest.importorskip("accelerate", reason="transformers refuses FP8 folders unless accelerate is installed")
    write_random_checkpoint(tmp_path / "hf", CONFIGS[family])
    convert.hf_to_fp8(tmp_path / "hf", tmp_path / "fp8", keep_bf16=["model.layers.1.mlp.*"])
    convert.fp8_to_hf(tmp_path / "fp8", tmp_path / "back")
    found = logits(tmp_path / "fp8")
    assert torch.equal(found, logits(tmp_path / "back"))
    error = (found - logits(tmp_path / "hf")).float().abs().mean()
    assert 0 < float(error) < 0.2


@pytest.mark.parametrize("family", CONFIGS)
def test_folder_written_by_transformers(tmp_path, family):
    """Their names, config and shards pass our checks, and what comes back through Megatron gives the same logits."""
    write_random_checkpoint(tmp_path / "hf", CONFIGS[family])
    load(tmp_path / "hf").save_pretrained(tmp_path / "theirs", max_shard_size="500KB")
    assert compare(open_source(tmp_path / "hf"), open_source(tmp_path / "theirs")).equal
    spec, theirs = open_source(tmp_path / "hf").spec, open_source(tmp_path / "theirs").spec
    assert (spec.rope_theta, spec.rms_eps, spec.tied, spec.head_dim) == (
        theirs.rope_theta, theirs.rms_eps, theirs.tied, theirs.head_dim)  # fmt: skip
    assert (theirs.rope_scaling or {}).get("factor") == (spec.rope_scaling or {}).get("factor")
    convert.hf_to_megatron(tmp_path / "theirs", tmp_path / "mg")
    convert.megatron_to_hf(tmp_path / "mg", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "hf"), logits(tmp_path / "back"))
