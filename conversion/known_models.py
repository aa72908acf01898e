"""config.json of the released models of each family, as far as sizes and layouts go: planning needs no download."""

from __future__ import annotations

import difflib
from typing import Any

from jetrl_conversion.errors import ConversionError

_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936,
          "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
          "attention_bias": False}  # fmt: skip
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6,
          "max_position_embeddings": 32768}  # fmt: skip
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rope_theta": 5e5,
          "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "attention_bias": False,
          "mlp_bias": False}  # fmt: skip
_MOE = _QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128,
                 "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
                 "mlp_only_layers": []}  # fmt: skip


def _sizes(base: dict, hidden: int, layers: int, heads: int, kv: int, ffn: int, tied: bool, **more: Any) -> dict:
    return base | {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
                   "num_key_value_heads": kv, "intermediate_size": ffn, "tie_word_embeddings": tied,
                   **more}  # fmt: skip


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _sizes(_QWEN3, 1024, 28, 16, 8, 3072, True),
    "Qwen3-1.7B": _sizes(_QWEN3, 2048, 28, 16, 8, 6144, True),
    "Qwen3-4B": _sizes(_QWEN3, 2560, 36, 32, 8, 9728, True),
    "Qwen3-8B": _sizes(_QWEN3, 4096, 36, 32, 8, 12288, False),
    "Qwen3-14B": _sizes(_QWEN3, 5120, 40, 40, 8, 17408, False),
    "Qwen3-32B": _sizes(_QWEN3, 5120, 64, 64, 8, 25600, False),
    "Qwen2.5-0.5B": _sizes(_QWEN2, 896, 24, 14, 2, 4864, True, vocab_size=151936),
    "Qwen2.5-1.5B": _sizes(_QWEN2, 1536, 28, 12, 2, 8960, True, vocab_size=151936),
    "Qwen2.5-3B": _sizes(_QWEN2, 2048, 36, 16, 2, 11008, True, vocab_size=151936),
    "Qwen2.5-7B": _sizes(_QWEN2, 3584, 28, 28, 4, 18944, False, vocab_size=152064),
    "Qwen2.5-14B": _sizes(_QWEN2, 5120, 48, 40, 8, 13824, False, vocab_size=152064),
    "Qwen2.5-32B": _sizes(_QWEN2, 5120, 64, 40, 8, 27648, False, vocab_size=152064),
    "Qwen2.5-72B": _sizes(_QWEN2, 8192, 80, 64, 8, 29568, False, vocab_size=152064),
    "Llama-3.1-8B": _sizes(_LLAMA, 4096, 32, 32, 8, 14336, False, rope_scaling=_llama3_rope(8.0)),
    "Llama-3.1-70B": _sizes(_LLAMA, 8192, 80, 64, 8, 28672, False, rope_scaling=_llama3_rope(8.0)),
    "Llama-3.2-1B": _sizes(_LLAMA, 2048, 16, 32, 8, 8192, True, head_dim=64, rope_scaling=_llama3_rope(32.0)),
    "Llama-3.2-3B": _sizes(_LLAMA, 3072, 28, 24, 8, 8192, True, head_dim=128, rope_scaling=_llama3_rope(32.0)),
    "Qwen3-30B-A3B": _sizes(_MOE, 2048, 48, 32, 4, 6144, False, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _sizes(_MOE, 4096, 94, 64, 4, 12288, False, moe_intermediate_size=1536),
}


def known_config(name: str) -> dict[str, Any]:
    """config.json of a released model by its name, with or without the organization before it.

    Raises:
        ConversionError: not in the table; the nearest name is given.
    """
    short = name.rsplit("/", 1)[-1]
    found = {key.lower(): config for key, config in MODELS.items()}.get(short.lower())
    if found is None:
        near = difflib.get_close_matches(short, MODELS, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConversionError(f"{name}: no such folder or file, and no known model{hint}")
    return dict(found)
