"""Rotary position embedding by vLLM's CUDA kernel, with the transposed rotation as its gradient."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jetrl_megatron.engine_ops.rope import Rope, _table
from jetrl_megatron.megatron.gpu import library


@functools.lru_cache(maxsize=4)
def table_on(rope: Rope, device: torch.device) -> Tensor:
    """The engine's BF16 table `[positions, D]`. vLLM computes it on the GPU, whose cosines differ from a CPU's."""
    with torch.device(device):
        return _table.__wrapped__(rope)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, positions: Tensor, table: Tensor):
        q_out, k_out = (x.flatten(1).clone(memory_format=torch.contiguous_format) for x in (q, k))
        torch.ops._C.rotary_embedding(positions, q_out, k_out, q.shape[-1], table, True)
        ctx.save_for_backward(positions, table)
        return q_out.view(q.shape), k_out.view(k.shape)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        positions, table = ctx.saved_tensors
        # The transposed rotation is the rotation by the negative angle: the same kernel with negated sines. It
        # multiplies in FP32 and rounds once, as the textbook formula in FP32 would.
        cos, sin = table.chunk(2, dim=-1)
        back = torch.cat((cos, -sin), dim=-1)
        out = [g.flatten(1).clone(memory_format=torch.contiguous_format) for g in grads]
        torch.ops._C.rotary_embedding(positions, out[0], out[1], grads[0].shape[-1], back, True)
        return *(o.view(g.shape) for o, g in zip(out, grads)), None, None


def rope(q: Tensor, k: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as the engine does.

    Args:
        q: `[T, heads, D]` BF16 on a GPU. k: `[T, kv_heads, D]` BF16.
        positions: `[T]` int64, below `rope.max_positions` (not checked: that would wait for the GPU).
        rope: the model's rotary embedding.

    Returns:
        New tensors of q's and k's shapes, BF16.

    Raises:
        ValueError: shapes or dtypes that do not fit. GpuOpsError: vLLM's operations cannot be loaded.
    """
    library.load("_C", "rotary_embedding")
    for name, x in (("q", q), ("k", k)):
        if x.dtype != torch.bfloat16 or x.ndim != 3 or x.shape[-1] != rope.head_dim:
            raise ValueError(f"{name}: expected BF16 [T, heads, {rope.head_dim}], not {x.dtype} {list(x.shape)}")
    if positions.dtype != torch.int64 or positions.shape != q.shape[:1]:
        raise ValueError(f"positions: expected int64 [{q.shape[0]}], not {positions.dtype} {list(positions.shape)}")
    return _Rope.apply(q, k, positions, table_on(rope, q.device))  # type: ignore[return-value]
