"""FlashAttention 3 that never splits a sequence's keys: a token's result depends on its own context alone.

vLLM's default splits long contexts over thread blocks by a heuristic of the batch, so that decode differs from prefill
from about 512 tokens on. With one split, decode, chunked prefill, paged and contiguous prefill give the same bits
(measured), and the trainer's forward calls the same kernel.
"""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from jetrl_megatron.rollout.gpu.options import SPLITS
from jetrl_megatron.rollout.plugin import NAME


class OneSplitBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata without a schedule that depends on the batch."""

    @property
    def _stock(self) -> bool:
        return self.model_config.quantization != NAME or self.vllm_config.additional_config.get(SPLITS, False)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> FlashAttentionMetadata:
        if self._stock:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = super().build(0, common_attn_metadata, fast_build=True)
        metadata.max_num_splits = 1
        return metadata

    def use_cascade_attention(self, *args, **kwargs) -> bool:
        if self._stock:
            return super().use_cascade_attention(*args, **kwargs)
        return False


class OneSplitFlashAttention(FlashAttentionBackend):
    """vLLM's backend under its own name, for engines with `quantization="jetrl"`."""

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return OneSplitBuilder


def register() -> None:
    """Put the backend in FLASH_ATTN's place. Other models of the process keep vLLM's behaviour."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{OneSplitFlashAttention.__qualname__}")
