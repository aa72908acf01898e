"""Rotary position embedding by vLLM's kernel, with the transposed rotation as its gradient."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.engine_ops.library import EngineOpsError, load


@dataclass(frozen=True)
class Rope:
    """What fixes the table of cosines and sines; hashable, so that one table serves all layers."""

    head_dim: int
    max_positions: int
    parameters: str
    """Hugging Face `rope_parameters` (`rope_theta`, `rope_type`, ...) as JSON with sorted keys."""

    @staticmethod
    def from_hf_config(config: dict[str, Any]) -> Rope:
        """Read a Hugging Face config dict, with `rope_parameters` or the older `rope_theta` and `rope_scaling`.

        Raises:
            EngineOpsError: only a part of each head is rotated (no supported family does).
        """
        scaling = config.get("rope_scaling") or {}
        parameters = dict(config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0), **scaling})
        parameters.setdefault("rope_type", parameters.pop("type", "default"))
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise EngineOpsError("partial_rotary_factor other than 1 is not supported")
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return Rope(head_dim, config["max_position_embeddings"], json.dumps(parameters, sort_keys=True))

    def table(self) -> Tensor:
        """`[max_positions, head_dim]` BF16: cosines in the first half of a row, sines in the second."""
        return _table(self)


@functools.cache
def _table(rope: Rope) -> Tensor:
    parameters = json.loads(rope.parameters)
    if parameters["rope_type"] != "default":
        return _scaled_table(rope, parameters)
    # Formula and order of operations of vLLM's RotaryEmbedding._compute_cos_sin_cache, rounded to the model's dtype.
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float) / rope.head_dim
    inverse_frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
    angles = torch.einsum("i,j -> ij", torch.arange(rope.max_positions, dtype=torch.float), inverse_frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()


def _scaled_table(rope: Rope, parameters: dict[str, Any]) -> Tensor:
    """Tables of scaled rotary embeddings (yarn, llama3, ...) come from vLLM's own classes; importing them is slow."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        layer = get_rope(rope.head_dim, rope.max_positions, rope_parameters=parameters, dtype=torch.bfloat16)
    return layer.cos_sin_cache


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, positions: Tensor, table: Tensor):
        # The kernel works in place on [tokens, heads * head_dim].
        q_out, k_out = q.flatten(1).clone(), k.flatten(1).clone()
        torch.ops._C.rotary_embedding(positions, q_out, k_out, q.shape[-1], table, True)
        ctx.save_for_backward(positions, table)
        return q_out.view(q.shape), k_out.view(k.shape)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        positions, table = ctx.saved_tensors
        cos, sin = table.index_select(0, positions).float().unsqueeze(1).chunk(2, dim=-1)
        return *(_rotate_back(grad, cos, sin) for grad in grads), None, None


def _rotate_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Transposed rotation in FP32, rounded once. grad `[T, heads, D]`, cos and sin `[T, 1, D/2]`."""
    first, second = grad.float().chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(grad.dtype)


def rope(q: Tensor, k: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys.

    Args:
        q: `[T, heads, D]` BF16.
        k: `[T, kv_heads, D]` BF16.
        positions: `[T]` int64, each token's position in its own sequence.
        rope: the model's rotary embedding.

    Returns:
        New tensors of q's and k's shapes, BF16.

    Raises:
        ValueError: a shape, dtype or position that does not fit.
        EngineOpsError: vLLM's operations cannot be loaded.
    """
    load()
    for name, x in (("q", q), ("k", k)):
        if x.dtype != torch.bfloat16 or x.ndim != 3 or x.shape[-1] != rope.head_dim:
            raise ValueError(f"{name}: expected BF16 [T, heads, {rope.head_dim}], not {x.dtype} {list(x.shape)}")
    if positions.dtype != torch.int64 or positions.shape != (q.shape[0],):
        raise ValueError(f"positions: expected int64 [{q.shape[0]}], not {positions.dtype} {list(positions.shape)}")
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < rope.max_positions:
        raise ValueError(f"positions: {int(positions.max())} is outside of the model's {rope.max_positions} positions")
    return _Rope.apply(q, k, positions, rope.table())  # type: ignore[return-value]
