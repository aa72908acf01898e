"""How vLLM is built on a GPU: compiled with our fusion, captured into CUDA graphs, attention that never splits."""

from __future__ import annotations

from typing import Any

from jetrl_megatron.rollout.types import EngineSettings

FUSIONS_OFF = (
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_attn_quant",
    "fuse_allreduce_rms",
    "enable_qk_norm_rope_fusion",
)
"""vLLM's passes that would put another quantizer, norm or rope in place of the trainer's."""


SPLITS = "jetrl_attention_splits"
"""Key of vLLM's `additional_config` for `EngineSettings.attention_splits`."""


def gpu_options(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that only a GPU engine takes."""
    from jetrl_megatron.rollout.gpu.fusion import FuseProducers

    return {
        "compilation_config": {
            "custom_ops": ["all"],
            "pass_config": dict.fromkeys(FUSIONS_OFF, False),
            "inductor_compile_config": {"post_grad_custom_post_pass": FuseProducers()},
        },
        "attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 3},
        "additional_config": {SPLITS: settings.attention_splits},
        "enable_sleep_mode": settings.sleep,
    }
