"""The fused operation against its parts, written out per element in float64."""

from __future__ import annotations

import math

import pytest
import torch

from jetrl_kernels.qk_norm_rope import qk_norm_rope


def inputs(tokens: int, heads: int, kv_heads: int, dim: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=g) * torch.logspace(-3, 3, tokens)[:, None]
    positions = torch.randint(0, 97, (tokens,), generator=g)
    angles = torch.arange(97)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    table = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()
    weights = [(1 + 0.2 * torch.randn(dim, generator=g)).bfloat16() for _ in range(2)]
    return qkv.bfloat16(), positions, table, weights


@pytest.mark.parametrize("norm", [True, False])
def test_each_head_is_normed_and_rotated(norm: bool) -> None:
    heads, kv_heads, dim = 4, 2, 16
    qkv, positions, table, weights = inputs(3, heads, kv_heads, dim)
    q, k = qk_norm_rope(qkv, positions, table, heads, kv_heads, *(weights if norm else (None, None)), eps=1e-6)
    for out, first, count, weight in ((q, 0, heads, weights[0]), (k, heads, kv_heads, weights[1])):
        for t in range(3):
            for h in range(count):
                x = qkv[t, (first + h) * dim :][:dim].double()
                if norm:
                    x = (x * (1 / math.sqrt(float(x.square().mean()) + 1e-6))).bfloat16().double() * weight.double()
                    x = x.bfloat16().double()
                cos, sin = table[positions[t]].double().chunk(2)
                a, b = x.chunk(2)
                expected = torch.cat((a * cos - b * sin, b * cos + a * sin))
                # One BF16 rounding of the result (2**-9 relative), and the norm's two may fall to the other side.
                torch.testing.assert_close(out[t, h * dim :][:dim].double(), expected, rtol=2**-6, atol=1e-6)


def test_values_are_not_read_and_bad_shapes_are_named() -> None:
    qkv, positions, table, weights = inputs(5, 2, 1, 16)
    spoiled = qkv.clone()
    spoiled[:, 3 * 16 :] = float("nan")
    first, second = (qk_norm_rope(x, positions, table, 2, 1, *weights) for x in (qkv, spoiled))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    with pytest.raises(ValueError, match=r"is not \[5, \(3 \+ 2 x 1\) x 16\]"):
        qk_norm_rope(qkv, positions, table, 3, 1, *weights)
    with pytest.raises(ValueError, match="one of q_weight and k_weight"):
        qk_norm_rope(qkv, positions, table, 2, 1, weights[0])
