"""The trainer's rope and attention: gradients against autograd of the textbook formula, rows independent of the batch.

That the forward equals the engine's is held by test_rollout_engine.py against a running engine.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from jetrl_megatron.engine_ops import EngineOpsError, Rope, attention, attention_isa, rope

CONFIG = {"rope_theta": 10000.0, "head_dim": 128, "max_position_embeddings": 512}
MIXED = [5, 300, 1, 128, 129, 64]
"""Lengths around the engine's block of 128 tokens."""


def batch(lengths, heads=4, kv_heads=2, dim=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(sum(lengths), n, dim, generator=generator).bfloat16().requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    positions = torch.cat([torch.arange(n) for n in lengths])
    return q, k, v, positions, F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def both(q, k, v, positions, cu_seqlens):
    q, k = rope(q, k, positions, Rope.from_hf_config({**CONFIG, "head_dim": q.shape[-1]}))
    return attention(q, k, v, cu_seqlens, q.shape[-1] ** -0.5)


def textbook(q, k, v, positions, cu_seqlens):
    """Float64, from the definitions; the rotary table alone is the model's BF16 one."""
    dim = q.shape[-1]
    table = Rope.from_hf_config({**CONFIG, "head_dim": dim}).table()
    cos, sin = table[positions].double().unsqueeze(1).chunk(2, -1)

    def rotate(x):
        first, second = x.double().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    q, k, v = rotate(q), rotate(k), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * dim**-0.5
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        probs = scores.masked_fill(future, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probs, v[start:end]))
    return torch.cat(outputs).flatten(1)


@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 128), (2, 2, 128), (8, 1, 64), (4, 2, 80)])
def test_forward_and_gradients_follow_the_definition(heads, kv_heads, dim):
    """Errors are those of BF16 operands and results: 2**-9 relative, a few of them."""
    q, k, v, positions, cu_seqlens = batch(MIXED, heads, kv_heads, dim)
    out, want = both(q, k, v, positions, cu_seqlens), textbook(q, k, v, positions, cu_seqlens)
    assert ((out - want).norm() / want.norm()).item() < 2**-8
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = torch.autograd.grad(out, (q, k, v), grad)
    wanted = torch.autograd.grad(want, (q, k, v), grad.double())
    for ours, theirs in zip(found, wanted):
        assert ((ours - theirs).norm() / theirs.norm()).item() < 2**-7
        # Each sequence by itself: the error of a short one would drown in the whole.
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            a, b = ours[start:end], theirs[start:end]
            assert ((a - b).norm() / b.norm().clamp_min(1e-3)).item() < 2**-5


def test_a_sequence_does_not_depend_on_the_batch_around_it():
    q, k, v, positions, cu_seqlens = batch(MIXED)
    whole = both(q, k, v, positions, cu_seqlens)
    grads = torch.autograd.grad(whole.float().square().sum(), (q, k, v))
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        part = tuple(x[start:end].detach().requires_grad_() for x in (q, k, v))
        alone = both(part[0], part[1], part[2], positions[start:end], torch.tensor([0, end - start]))
        assert torch.equal(alone, whole[start:end])
        for one, all_ in zip(torch.autograd.grad(alone.float().square().sum(), part), grads):
            assert torch.equal(one, all_[start:end])


def test_nothing_from_the_future_or_a_neighbour():
    q, k, v, positions, cu_seqlens = batch([130, 40])
    before = both(q, k, v, positions, cu_seqlens)
    with torch.no_grad():
        k[100:130] += 3
        v[100:130] -= 3
    after = both(q, k, v, positions, cu_seqlens)
    assert torch.equal(after[:100], before[:100])
    assert torch.equal(after[130:], before[130:])
    assert not torch.equal(after[100:130], before[100:130])


def test_old_and_new_config_keys_give_the_same_rope():
    old = Rope.from_hf_config(CONFIG)
    new = Rope.from_hf_config(
        {
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "hidden_size": 1024,
            "num_attention_heads": 8,
            "max_position_embeddings": 512,
        }
    )
    assert old == new
    assert torch.equal(old.table(), new.table())


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1000000.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)
def test_table_is_the_engines(parameters):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        layer = get_rope(128, 512, rope_parameters=parameters, dtype=torch.bfloat16)
    ours = Rope.from_hf_config({"rope_parameters": parameters, "head_dim": 128, "max_position_embeddings": 512})
    assert torch.equal(ours.table(), layer.cos_sin_cache)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_instruction_set_is_the_engines(head_dim):
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    assert attention_isa(head_dim) == _get_attn_isa(torch.bfloat16, 128, head_dim, "auto")


def test_what_does_not_fit_is_refused():
    q, k, v, positions, cu_seqlens = batch([3, 2])
    table = Rope.from_hf_config(CONFIG)
    with pytest.raises(ValueError, match="outside of the model's 512 positions"):
        rope(q, k, positions + 510, table)
    with pytest.raises(ValueError, match="q: expected BF16"):
        rope(q.float(), k, positions, table)
    with pytest.raises(ValueError, match="does not cut 5 tokens"):
        attention(q, k, v, torch.tensor([0, 3, 3, 5]), 1.0)
    with pytest.raises(ValueError, match="v: expected BF16"):
        attention(q, k, v.float(), cu_seqlens, 1.0)
    with pytest.raises(EngineOpsError, match="partial_rotary_factor"):
        Rope.from_hf_config({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}})
