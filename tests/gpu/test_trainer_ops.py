"""The trainer's GPU operations against textbook formulas in FP32, and the two linear backends against each other."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

BOUNDS = [0, 1, 130, 131, 400, 1024]


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def _textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """FP32 causal attention of one sequence, key/value heads repeated."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q, k) * scale
    future = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("nqk,knd->qnd", scores.masked_fill(future, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2)])
def test_attention_and_its_gradient(heads: int, kv_heads: int) -> None:
    from jetrl_megatron.megatron.gpu import attention

    T, D = BOUNDS[-1], 128
    q, k, v = _randn(T, heads, D), _randn(T, kv_heads, D, seed=1), _randn(T, kv_heads, D, seed=2)
    grad = _randn(T, heads * D, seed=3)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    cu = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    out = attention(inputs[0], inputs[1], inputs[2], cu, D**-0.5)
    out.backward(grad)
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    q32, k32, v32 = exact
    parts = [_textbook(q32[a:b], k32[a:b], v32[a:b], D**-0.5) for a, b in itertools.pairwise(BOUNDS)]
    want = torch.cat(parts).flatten(1)
    want.backward(grad.float())
    # One BF16 rounding of the probabilities and one of the result: 2**-8 of the largest terms.
    assert (out.float() - want).abs().max() < 2**-6 * want.abs().max()
    for name, ours, theirs in zip("qkv", inputs, exact):
        assert ours.grad is not None and theirs.grad is not None
        error = (ours.grad.float() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.01, f"d{name}: {error}"


def test_attention_of_a_sequence_does_not_depend_on_its_neighbours() -> None:
    from jetrl_megatron.megatron.gpu import attention

    T, D = BOUNDS[-1], 128
    q, k, v = _randn(T, 8, D), _randn(T, 2, D, seed=1), _randn(T, 2, D, seed=2)
    whole = attention(q, k, v, torch.tensor(BOUNDS, dtype=torch.int32, device="cuda"), D**-0.5)
    for a, b in itertools.pairwise(BOUNDS):
        alone = torch.tensor([0, b - a], dtype=torch.int32, device="cuda")
        assert torch.equal(attention(q[a:b], k[a:b], v[a:b], alone, D**-0.5), whole[a:b])


def test_rope_rotates_and_its_gradient_rotates_back() -> None:
    from jetrl_megatron.engine_ops import Rope
    from jetrl_megatron.engine_ops.rope import _rotate_back
    from jetrl_megatron.megatron.gpu import rope
    from jetrl_megatron.megatron.gpu.rope import table_on

    settings = Rope.from_hf_config(
        {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 2048,
         "rope_theta": 1e6}
    )  # fmt: skip
    positions = torch.arange(300, device="cuda") * 3
    q, k = _randn(300, 4, 128).requires_grad_(), _randn(300, 2, 128, seed=1).requires_grad_()
    rotated, _ = rope(q, k, positions, settings)
    cos, sin = table_on(settings, q.device).index_select(0, positions).float().unsqueeze(1).chunk(2, -1)
    first, second = q.detach().float().chunk(2, -1)
    want = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    assert (rotated.float() - want).abs().max() <= 2**-8 * want.abs().max()
    grad = _randn(300, 4, 128, seed=2)
    rotated.backward(grad)
    back = _rotate_back(grad, cos, sin)
    assert q.grad is not None
    assert (q.grad.float() - back.float()).abs().max() <= 2**-7 * back.abs().max()
