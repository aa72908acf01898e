"""The engine's fused head norm and rope against the trainer's separate ones: the same bits."""

from __future__ import annotations

import os

import pytest
import torch

from jetrl_kernels.qk_norm_rope import kernel, reference
from jetrl_kernels.qk_norm_rope.test_qk_norm_rope import inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", [(1, 32, 8, 128), (31, 64, 8, 128), (256, 14, 2, 64), (7, 3, 1, 256), (5, 2, 2, 16)])
def test_fused_equals_its_parts(shape, norm: bool) -> None:
    tokens, heads, kv_heads, _ = shape
    qkv, positions, table, weights = inputs(*shape, seed=tokens)
    qkv, positions, table = (x.to(DEVICE) for x in (qkv, positions, table))
    q_weight, k_weight = (w.to(DEVICE) if norm else None for w in weights)
    fused = kernel.forward(qkv, positions, table, heads, kv_heads, q_weight, k_weight, 1e-6)
    parts = reference.qk_norm_rope(qkv, positions, table, heads, kv_heads, q_weight, k_weight, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(fused, parts))


@pytest.mark.skipif(INTERPRETED, reason="vLLM's kernel needs a GPU")
@pytest.mark.parametrize("norm", [True, False])
def test_fused_equals_the_trainers_norm_and_rope(norm: bool) -> None:
    from jetrl_kernels.rms_norm import rms_norm
    from jetrl_megatron.megatron.gpu import library

    library.load("_C", "rotary_embedding")
    tokens, heads, kv_heads, dim = 1000, 32, 8, 128
    qkv, positions, table, weights = inputs(tokens, heads, kv_heads, dim, seed=1)
    qkv, positions, table, *weights = (x.cuda() for x in (qkv, positions, table, *weights))
    q_weight, k_weight = weights if norm else (None, None)
    fused = kernel.forward(qkv, positions, table, heads, kv_heads, q_weight, k_weight, 1e-6)
    q, k, _ = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    rows = [x.reshape(tokens, -1, dim) for x in (q, k)]
    if norm:
        rows = [rms_norm(x, w, 1e-6) for x, w in zip(rows, weights)]
    q, k = (x.reshape(tokens, -1).contiguous() for x in rows)
    torch.ops._C.rotary_embedding(positions, q, k, dim, table, True)
    assert torch.equal(fused[0], q) and torch.equal(fused[1], k)
