"""The objective against hand calculation, autograd against finite differences, sums against shards."""

import math
from typing import Any

import pytest
import torch

from jetrl_megatron.loss import Divergence, group_advantages, grpo_loss, token_logprobs

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}


def test_processed_logprobs_at_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    logp = token_logprobs(logits, torch.tensor([0, 1, 2]), temperature=0.5)
    torch.testing.assert_close(logp, torch.tensor([-0.1429, -2.1429, -4.1429]), atol=5e-5, rtol=0)


def test_unchanged_weights_give_ratio_one():
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(50)
    engine = token_logprobs(logits, targets, 0.5)
    trainer = token_logprobs(logits, targets, 0.5).requires_grad_()
    advantages = torch.linspace(-1, 1, 50)
    mask = torch.ones(50, dtype=torch.bool)
    loss, stats = grpo_loss(trainer, engine, advantages, mask, **CLIP, denominator=50)
    assert stats["ratio_sum"].item() == 50.0
    assert stats["clipped_low"].item() == stats["clipped_high"].item() == 0
    torch.testing.assert_close(loss, -advantages.mean())
    figures = Divergence.of(trainer, engine, mask).metrics()
    assert figures == {
        "kl_k1": 0.0,
        "kl_k3": 0.0,
        "ess": 1.0,
        "logprob_abs_diff_mean": 0.0,
        "logprob_abs_diff_max": 0.0,
        "logprob_mismatch_fraction": 0.0,
    }


def test_unprocessed_logprobs_do_not_match_processed_ones():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    raw = token_logprobs(logits, torch.tensor([1]), 1.0)
    processed = token_logprobs(logits, torch.tensor([1]), 0.5)
    assert (processed - raw).item() == pytest.approx(-2.1429 + 1.4076, abs=1e-3)


@pytest.mark.parametrize("std", [True, False])
def test_advantages_by_hand(std):
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0, 2.0, 6.0])
    groups = torch.tensor([9, 4, 9, 4, 9, 4])  # neither sorted nor dense
    got = group_advantages(rewards, groups, std=std)
    expected = torch.tensor([0.0, -1.0, -1.0, 1.0, 1.0, 0.0])  # both groups: mean +- 1, sample deviation 1
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    assert got.dtype == torch.float32


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_zero(reward, std):
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([0] * 7 + [1, 1])
    got = group_advantages(rewards, groups, std=std)
    assert torch.equal(got[:7], torch.zeros(7))
    assert got[8] == -got[7] > 0


def test_group_of_one_is_zero_and_bad_rewards_are_refused():
    assert torch.equal(group_advantages(torch.tensor([0.7]), torch.tensor([3]), std=True), torch.zeros(1))
    with pytest.raises(ValueError, match="answer 1 is not finite"):
        group_advantages(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]), std=True)
    with pytest.raises(ValueError, match="equal vectors"):
        group_advantages(torch.zeros(3), torch.zeros(2), std=True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),  # inside
        (1.5, 1.0, -1.3, 0.0),  # clipped above: no gradient
        (1.5, -1.0, 1.5, 1.5),  # a bad token that became likelier keeps its gradient
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_clipping_by_hand(ratio, advantage, value, slope):
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    args = (logp, torch.zeros(1), torch.tensor([advantage]), torch.ones(1, dtype=torch.bool))
    loss, stats = grpo_loss(*args, **CLIP, denominator=1)
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-6)
    assert logp.grad.item() == pytest.approx(slope, rel=1e-6)
    assert (stats["clipped_low"] + stats["clipped_high"]).item() == (slope == 0)


def test_importance_cap_truncates_value_and_gradient():
    logp = torch.tensor([math.log(8.0)], requires_grad=True)
    args = (logp, torch.zeros(1), -torch.ones(1), torch.ones(1, dtype=torch.bool))
    loss, stats = grpo_loss(*args, **CLIP, denominator=1, importance_cap=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(2.0) and logp.grad.item() == pytest.approx(2.0)
    assert stats["capped"].item() == 1


def test_masked_tokens_contribute_nothing_even_as_nan():
    logp = torch.tensor([0.1, math.nan, -0.2], requires_grad=True)
    mask = torch.tensor([True, False, True])
    advantages = torch.tensor([1.0, math.nan, -1.0])
    loss, stats = grpo_loss(logp, torch.zeros(3), advantages, mask, **CLIP, denominator=2)
    loss.backward()
    assert torch.isfinite(loss) and stats["loss_tokens"] == 2
    assert logp.grad[1] == 0 and torch.isfinite(logp.grad).all()


def test_broken_token_stays_finite():
    logp = torch.tensor([0.0, 0.0], requires_grad=True)
    engine = torch.tensor([-500.0, 0.0])
    loss, _ = grpo_loss(logp, engine, torch.tensor([0.0, 1.0]), torch.ones(2), **CLIP, denominator=2)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logp.grad).all()


def test_norms_weigh_long_answers_as_named():
    sequences = torch.tensor([7, 7, 7, 7, 2])  # four tokens of one answer, one of another
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0])
    ones = torch.ones(5, dtype=torch.bool)
    args = (torch.zeros(5), torch.zeros(5), advantages, ones)
    token, _ = grpo_loss(*args, **CLIP, denominator=5)
    sequence, _ = grpo_loss(*args, **CLIP, norm="sequence_mean", denominator=2, sequences=sequences)
    assert token.item() == pytest.approx(-3 / 5)
    assert sequence.item() == pytest.approx(0.0)
    with pytest.raises(ValueError, match="sequences"):
        grpo_loss(*args, **CLIP, norm="sequence_mean", denominator=2)
    with pytest.raises(ValueError, match="unknown loss norm"):
        grpo_loss(*args, **CLIP, norm="mean", denominator=2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("norm", ["token_mean", "sequence_mean"])
def test_shards_add_up_to_the_batch(norm):
    g = torch.Generator().manual_seed(1)
    logp = (torch.randn(60, generator=g) * 0.3).requires_grad_()
    engine, advantages = torch.randn(60, generator=g) * 0.3, torch.randn(60, generator=g)
    mask, sequences = torch.rand(60, generator=g) < 0.8, torch.arange(60) // 12
    denominator = mask.sum() if norm == "token_mean" else 5

    def part(rows):
        return grpo_loss(
            logp[rows],
            engine[rows],
            advantages[rows],
            mask[rows],
            **CLIP,
            norm=norm,
            denominator=denominator,
            sequences=sequences[rows],
        )

    whole, stats = part(slice(0, 60))
    whole_gradient = torch.autograd.grad(whole, logp)[0]
    parts = [part(slice(0, 24)), part(slice(24, 36)), part(slice(36, 60))]
    gradient = torch.autograd.grad(sum(loss for loss, _ in parts), logp)[0]
    torch.testing.assert_close(gradient, whole_gradient)
    for key, value in stats.items():
        torch.testing.assert_close(sum(s[key] for _, s in parts), value)


def test_gradient_by_finite_differences():
    g = torch.Generator().manual_seed(2)
    engine, advantages = torch.randn(8, generator=g), torch.randn(8, generator=g)
    start = engine + torch.randn(8, generator=g) * 0.1
    mask = torch.ones(8, dtype=torch.bool)

    def loss(x):
        return grpo_loss(x, engine, advantages, mask, **CLIP, denominator=8)[0]

    logp = start.clone().requires_grad_()
    gradient = torch.autograd.grad(loss(logp), logp)[0]
    for i in range(8):
        step = torch.zeros(8)
        step[i] = 1e-3
        slope = (loss(start + step) - loss(start - step)) / 2e-3
        assert gradient[i].item() == pytest.approx(slope.item(), abs=1e-3)


def test_divergence_of_shards_equals_that_of_the_whole():
    g = torch.Generator().manual_seed(3)
    a = torch.randn(100, generator=g)
    b = a + torch.randn(100, generator=g) * 0.01 * (torch.arange(100) % 3 == 0)
    mask = torch.rand(100, generator=g) < 0.7
    whole = Divergence.of(a, b, mask).metrics()
    parts = Divergence.of(a[:30], b[:30], mask[:30]) + Divergence.of(a[30:], b[30:], mask[30:])
    assert parts.metrics() == pytest.approx(whole, rel=1e-12)
    d = (a.double() - b.double())[mask]
    w = d.exp()
    assert whole["kl_k1"] == pytest.approx(-d.mean().item())
    assert whole["kl_k3"] == pytest.approx((w - 1 - d).mean().item(), rel=1e-6)
    assert whole["ess"] == pytest.approx((w.sum() ** 2 / (len(w) * (w * w).sum())).item())
    assert whole["logprob_abs_diff_max"] == d.abs().max().item()
    assert whole["logprob_mismatch_fraction"] == pytest.approx((d != 0).double().mean().item())
    assert 0 < whole["logprob_mismatch_fraction"] < 0.5


def test_divergence_counts_one_bit_and_shows_nan():
    a = torch.tensor([-1.0, -2.0, -3.0])
    b = torch.nextafter(a, torch.zeros(3)) * torch.tensor([1.0, 0, 0]) + a * torch.tensor([0.0, 1, 1])
    mask = torch.ones(3, dtype=torch.bool)
    assert Divergence.of(a, b, mask).metrics()["logprob_mismatch_fraction"] == pytest.approx(1 / 3)
    broken = Divergence.of(torch.tensor([math.nan, 0.0]), torch.zeros(2), torch.ones(2)).metrics()
    assert math.isnan(broken["kl_k1"]) and broken["logprob_mismatch_fraction"] == 0.5
    empty = Divergence.of(a, b, torch.zeros(3)).metrics()
    assert empty["ess"] == 1.0 and empty["logprob_abs_diff_max"] == 0.0
