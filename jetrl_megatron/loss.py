"""The objective, as pure functions over flat `[T]` token tensors.

Legend: T = tokens of a packed (micro) batch, N = answers of a step. The behaviour policy is the engine: every ratio is
`exp(trainer's log-prob now - engine's log-prob at sampling)`, never one against log-probs recomputed by the trainer.
Everything that is averaged is returned as a sum with its count, so that shards of data-parallel ranks and
micro-batches add up to exactly the statistic of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossNorm = Literal["token_mean", "sequence_mean"]

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 5e8: far outside any clip range, far inside FP32. Without it one broken token turns 0 x inf into NaN."""

ADVANTAGE_EPS = 1e-6
"""Added to a group's standard deviation (the value TRL and verl use)."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of `targets` under the *processed* distribution softmax(logits / temperature).

    Args:
        logits: `[T, V]`, any float type; computed in FP32.
        targets: `[T]` int64.
        temperature: > 0; the sampling temperature, so that trainer and engine talk of the same distribution.

    Returns:
        `[T]` FP32.
    """
    logp_TV = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logp_TV.gather(-1, targets[:, None]).squeeze(-1)


def group_advantages(rewards: Tensor, groups: Tensor, *, std: bool) -> Tensor:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, eq. 4.1.2): `(r - mean) / (std + 1e-6)`.

    Args:
        rewards: `[N]` any float type.
        groups: `[N]` integers; answers of one prompt share a number. Order and numbering do not matter.
        std: divide by the group's sample standard deviation (n - 1), or only subtract the mean.

    Returns:
        `[N]` FP32. Exactly zero, never NaN, for a group whose rewards are all equal and for a group of one.

    Raises:
        ValueError: a reward is not finite, or shapes differ.
    """
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be equal vectors")
    if not torch.isfinite(rewards).all():
        raise ValueError(f"reward of answer {int((~torch.isfinite(rewards)).nonzero()[0])} is not finite")
    r = rewards.double()
    _, index = torch.unique(groups, return_inverse=True)
    count = torch.bincount(index).double()
    mean = torch.zeros_like(count).index_add_(0, index, r) / count
    delta = r - mean[index]
    high = torch.full_like(count, -torch.inf).scatter_reduce_(0, index, r, "amax")
    low = torch.full_like(count, torch.inf).scatter_reduce_(0, index, r, "amin")
    # Rounding of the mean leaves 1e-17 in a group of equal rewards, which a tiny std would blow up: cut it here.
    delta = torch.where((high == low)[index], torch.zeros_like(delta), delta)
    if std:
        variance = torch.zeros_like(count).index_add_(0, index, delta * delta) / (count - 1).clamp(min=1)
        delta = delta / (variance.sqrt()[index] + ADVANTAGE_EPS)
    return delta.float()


def grpo_loss(
    logp: Tensor,
    engine_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    norm: LossNorm = "token_mean",
    denominator: float | Tensor,
    importance_cap: float = 0.0,
    sequences: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)` over the tokens of a batch.

    Args:
        logp: `[T]` trainer's log-probs of the sampled tokens, with gradient.
        engine_logp: `[T]` the engine's log-probs of the same tokens when it sampled them.
        advantages: `[T]`, constant over an answer.
        mask: `[T]` bool; False for prompt and padding, which then contribute exactly zero, NaN included.
        norm: `token_mean` sums over tokens, `sequence_mean` over the means of the answers.
        denominator: what the sum is divided by: tokens (or answers) of the *whole* step over all ranks and
            micro-batches, so that losses and gradients of the parts add up to those of the whole.
        importance_cap: > 0 truncates the ratio that weights value and gradient at this number.
        sequences: `[T]` integers naming each token's answer; needed for `sequence_mean`. An answer's tokens lie in
            one call.

    Returns:
        The loss (FP32 scalar) and detached sums: `loss_tokens`, `clipped_low`, `clipped_high`, `ratio_sum`, `capped`.

    Raises:
        ValueError: `sequence_mean` without `sequences`, or an unknown norm.
    """
    mask = mask.bool()
    zero = torch.zeros((), dtype=torch.float32, device=logp.device)
    # where() and not a product: NaN * 0 is NaN, and a masked slot may hold anything.
    log_ratio = torch.where(mask, logp.float() - engine_logp.float(), zero)
    advantages = torch.where(mask, advantages.float(), zero)
    ratio = torch.exp(log_ratio.clamp(max=LOG_RATIO_LIMIT))
    weight = ratio
    if importance_cap > 0:
        # Value and gradient both carry min(ratio, cap): a plain clamp would drop the gradient instead.
        weight = ratio * (ratio.clamp(max=importance_cap) / ratio).detach()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = -torch.minimum(weight * advantages, clipped * advantages)
    token_loss = torch.where(mask, token_loss, zero)
    if norm == "sequence_mean":
        if sequences is None:
            raise ValueError("sequence_mean needs the answer that each token belongs to (sequences)")
        _, index = torch.unique(sequences, return_inverse=True)
        length = torch.bincount(index, weights=mask.double()).clamp(min=1).float()
        token_loss = token_loss / length[index]
    elif norm != "token_mean":
        raise ValueError(f"unknown loss norm {norm!r}: token_mean or sequence_mean")
    with torch.no_grad():
        stats = {
            "loss_tokens": mask.sum().double(),
            "clipped_low": (mask & (ratio < 1 - clip_low) & (advantages < 0)).sum().double(),
            "clipped_high": (mask & (ratio > 1 + clip_high) & (advantages > 0)).sum().double(),
            "ratio_sum": torch.where(mask, ratio, zero).double().sum(),
            "capped": (mask & (ratio > importance_cap)).sum().double() if importance_cap > 0 else zero.double(),
        }
    return token_loss.sum() / denominator, stats


@dataclass
class Divergence:
    """How far the trainer's log-probs lie from the engine's, on the same tokens at the same weights.

    `sums` `[7]` FP64 adds up over shards (all-reduce with SUM), `peak` `[1]` FP64 is combined by MAX. With
    `d = trainer - engine` per token and `w = exp(d)`, sums are: count, d, w - 1 - d, |d|, d != 0, w, w^2.
    """

    sums: Tensor
    peak: Tensor

    @staticmethod
    def of(logp: Tensor, engine_logp: Tensor, mask: Tensor) -> Divergence:
        """Sums over the tokens where `mask` is True. All `[T]`; a NaN on either side stays visible as NaN."""
        mask = mask.bool()
        d = (logp.detach().double() - engine_logp.detach().double())[mask]
        limited = d.clamp(max=LOG_RATIO_LIMIT)
        w = torch.exp(limited)
        terms = (torch.ones_like(d), d, torch.expm1(limited) - d, d.abs(), (d != 0).double(), w, w * w)
        peak = d.abs().max() if d.numel() else d.new_zeros(())
        return Divergence(torch.stack([t.sum() for t in terms]), peak.reshape(1))

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(self.sums + other.sums, torch.maximum(self.peak, other.peak))

    def metrics(self) -> dict[str, float]:
        """The step's figures, from sums over the whole batch.

        `kl_k1` = mean(-d) and `kl_k3` = mean(w - 1 - d) estimate KL(engine || trainer) from the engine's samples
        (Schulman, "Approximating KL divergence"); `ess` = (sum w)^2 / (n sum w^2) in (0, 1] is the share of the
        samples that importance weighting leaves. No tokens at all: no difference, ess 1.
        """
        n, d, k3, absolute, mismatched, w, w2 = self.sums.tolist()
        some = n > 0
        return {
            "kl_k1": -d / n if some else 0.0,
            "kl_k3": k3 / n if some else 0.0,
            "ess": w * w / (n * w2) if some and w2 else 1.0,
            "logprob_abs_diff_mean": absolute / n if some else 0.0,
            "logprob_abs_diff_max": self.peak.item(),
            "logprob_mismatch_fraction": mismatched / n if some else 0.0,
        }
