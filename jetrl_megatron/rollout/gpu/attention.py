"""vLLM's FlashAttention 3 with keys cut at fixed positions only: a token's result depends on its own context alone.

vLLM's default splits long contexts over thread blocks by a heuristic of the batch, so that decode differs from prefill
from about 512 tokens on. Here a context is cut at multiples of `PART` keys, in decode, in prompts whole or in chunks,
and in the trainer's forward (`engine_ops/flash_attention.py`). Engines whose contexts stay within one part run vLLM's
own code with one split.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from jetrl_kernels.attention_parts import PART
from jetrl_megatron.engine_ops.flash_attention import Cuts, DecodeCuts, cut, cut_decode, cut_paged, parts_of
from jetrl_megatron.rollout.gpu.options import SPLITS
from jetrl_megatron.rollout.plugin import NAME

TILE = 128
"""Keys of FlashAttention's tile. Pages of whole tiles would be read by other code, with tiles of another size."""


@dataclass
class CutMetadata(FlashAttentionMetadata):
    """vLLM's metadata and where keys are cut: for a batch of one query each, or else for one with prompts."""

    decode: DecodeCuts | None = None
    cuts: Cuts | None = None
    own_pages: torch.Tensor | None = None
    """int32 `[sequences x parts, pages of a part]`."""


def _as_vllm_does(config: VllmConfig) -> bool:
    return config.model_config.quantization != NAME or config.additional_config.get(SPLITS, False)


class CutBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata without a schedule that depends on the batch, and the cuts."""

    supports_update_block_table = False  # the cuts hold tables of their own

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.as_vllm_does = _as_vllm_does(vllm_config)
        self.parts = parts_of(vllm_config.model_config.max_model_len)
        if self.as_vllm_does or self.parts == 1:
            return
        if PART % self.block_size or self.block_size % TILE == 0:
            raise ValueError(
                f"pages of {self.block_size} keys: they must divide {PART} and be no multiple of {TILE}; vLLM's own "
                "choice of block_size is 16"
            )

    @functools.cached_property
    def buffers(self) -> DecodeCuts:
        """What graphs read. Made when first asked for: the builder is made where memory does not outlast sleep."""
        sequences = max(self.vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        return DecodeCuts.empty(sequences, self.parts, self.block_size, self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        if _as_vllm_does(vllm_config) or parts_of(vllm_config.model_config.max_model_len) == 1:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        # The number of calls for a batch with prompts depends on its contexts.
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        if self.as_vllm_does:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = super().build(0, common_attn_metadata, fast_build=True)
        metadata.max_num_splits = 1
        if self.parts == 1:
            return metadata
        common, found = common_attn_metadata, CutMetadata(**vars(metadata))
        table, lengths = common.block_table_tensor[: common.num_reqs], common.seq_lens[: common.num_reqs]
        if common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs:
            # Always, however short the contexts: a graph reads the buffers.
            self.buffers.fill(lengths, table)
            found.decode = self.buffers.first(common.num_reqs, lengths)
        elif common.max_seq_len > PART:
            starts = common.query_start_loc[: common.num_reqs + 1]
            found.cuts = cut(starts, lengths, common.num_actual_tokens, common.max_seq_len)
            columns = found.cuts.parts * PART // self.block_size
            table = torch.nn.functional.pad(table[:, :columns], (0, max(0, columns - table.shape[1])))
            found.own_pages = table.reshape(-1, PART // self.block_size)
        return found

    def use_cascade_attention(self, *args, **kwargs) -> bool:
        return super().use_cascade_attention(*args, **kwargs) if self.as_vllm_does else False


class CutFlashAttentionImpl(FlashAttentionImpl):
    """vLLM's, but where the metadata says where to cut."""

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        cut_at = attn_metadata if isinstance(attn_metadata, CutMetadata) else None
        if cut_at is None or (cut_at.decode is None and cut_at.cuts is None):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        # (pages, heads, keys of a page, 2 D) -> two of (pages, keys of a page, heads, D)
        k, v = map(canonicalize_singleton_dim_strides, kv_cache.transpose(1, 2).split(self.head_size, dim=-1))
        q, out = (x[: cut_at.num_actual_tokens] for x in (query, output))
        if cut_at.decode is not None:
            cut_decode(q, k, v, cut_at.decode, self.scale, out)
        else:
            assert cut_at.cuts is not None and cut_at.own_pages is not None
            cut_paged(q, k, v, cut_at.cuts, cut_at.own_pages, cut_at.max_query_len, self.scale, out)
        return output


class CutFlashAttention(FlashAttentionBackend):
    """vLLM's backend under its own name, for engines with `quantization="jetrl"`."""

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return CutBuilder

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return CutFlashAttentionImpl


def register() -> None:
    """Put the backend in FLASH_ATTN's place. Other models of the process keep vLLM's behaviour."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{CutFlashAttention.__qualname__}")
