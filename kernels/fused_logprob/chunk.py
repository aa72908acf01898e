"""One chunk of tokens or of the vocabulary: its logits, their softmax statistics and gradient. On a GPU, kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from jetrl_kernels.gemm_fp8 import wgrad_bf16


@dataclass(frozen=True)
class Spec:
    """What a call fixes: local vocabulary rows (padding left out, and with it), the vocabulary's true size, ..."""

    vocab_start: int
    rows: int
    padded_rows: int
    vocab_size: int
    temperature: float
    group: Any
    logits_dtype: torch.dtype
    chunk_logits: int
    whole: bool

    @property
    def inverse_temperature(self) -> float:
        return 1.0 / self.temperature

    def spans(self, tokens: int) -> Iterator[slice]:
        """Slices of tokens whose logits, gathered over the group where `whole`, stay under the bound."""
        width = self.rows if self.group is None or not self.whole else self.vocab_size
        return _spans(tokens, self.chunk_logits // max(width, 1))

    def vocabulary_spans(self, tokens: int) -> Iterator[slice]:
        """Slices of the local rows of the vocabulary whose logits of all `tokens` stay under the bound."""
        return _spans(self.rows if tokens else 0, self.chunk_logits // max(tokens, 1))


def _spans(total: int, most: int) -> Iterator[slice]:
    """Equal slices of [0, total) of at most `most` (at least 1), and of whole 128-row tiles where that allows it."""
    most = max(1, most)
    step = -(-total // max(-(-total // most), 1))
    if most >= 128:
        step = min(-(-step // 128) * 128, most // 128 * 128)
    for start in range(0, total, max(step, 1)):
        yield slice(start, min(start + step, total))


def logits(hidden: Tensor, head: Tensor, spec: Spec) -> Tensor:
    """hidden head^T as `spec.logits_dtype` [t, V]."""
    if spec.logits_dtype == hidden.dtype:
        return linear(hidden, head)
    if spec.logits_dtype == torch.bfloat16:
        return linear(hidden, head).to(torch.bfloat16)
    return head_logits(hidden, head)


def head_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """FP32 logits [t, V] of hidden [t, H] and head [V, H]; the trainer and the engine both call this."""
    if hidden.is_cuda:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    # Products of BF16 numbers are exact in float64 and their sum is off by less than an FP32 rounding: the result does
    # not depend on the order of summation, hence not on the batch, which an FP32 matmul's does.
    return (hidden.double() @ head.double().t()).float()


def local_targets(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row of each target among `rows` that start at id `first` (clamped), and whether it is there."""
    local = targets - first
    here = (local >= 0) & (local < rows)
    return local.clamp(0, max(rows - 1, 0)), here


def statistics(z: Tensor, targets: Tensor, spec: Spec) -> Tensor:
    """FP32 [4, t] of z [t, V]: max, sum of exp(s - max), the same times s, s of the target, for s = z / temperature."""
    if spec.rows == 0:
        out = torch.zeros(4, z.shape[0], device=z.device)
        out[0] = -torch.inf
        return out
    if z.is_cuda:
        from jetrl_kernels.fused_logprob import kernel

        return kernel.statistics(z, targets, spec.vocab_start, spec.inverse_temperature)
    z = z.float() * spec.inverse_temperature
    peak = z.amax(-1)
    local, here = local_targets(targets, spec.vocab_start, spec.rows)
    chosen = torch.where(here, z.gather(-1, local[:, None]).squeeze(-1), 0.0)
    weight = torch.exp(z - peak[:, None])
    return torch.stack([peak, weight.sum(-1), (weight * z).sum(-1), chosen])


def whole_logprob(z: Tensor, targets: Tensor, spec: Spec) -> Tensor:
    """FP32 [t] by the engine's own log-softmax over the whole vocabulary, whatever the split, from z [t, V].

    A split chunk is gathered over the ranks, so that the sum of exponentials has one order: on a CPU that of torch's
    log_softmax, which vLLM's sampler calls there, on a GPU that of vLLM's kernel (which may overwrite z).
    """
    if spec.group is not None:
        z = torch.nn.functional.pad(z, (0, spec.padded_rows - spec.rows))
        parts = [torch.empty_like(z) for _ in range(dist.get_world_size(spec.group))]
        dist.all_gather(parts, z.contiguous(), group=spec.group)
        z = torch.cat(parts, dim=-1)[:, : spec.vocab_size]
    if z.is_cuda:
        from jetrl_kernels.fused_logprob import kernel

        return kernel.token_logprob(z, targets, spec.temperature)
    return (z.float() / spec.temperature).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def grad_logits(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    span: slice,
    spec: Spec,
) -> Tensor:
    """d logits [T, span] in `hidden.dtype`, of the rows `span` of the local head [V, H].

    d logp / dz = onehot - p and d entropy / dz = -p (z - lse + entropy), with p = exp(z - lse); times 1 / temperature.
    """
    z = logits(hidden, head[span], spec)
    first = spec.vocab_start + span.start
    if z.is_cuda:
        from jetrl_kernels.fused_logprob import kernel

        return kernel.gradient(z, targets, saved, grads, first, spec.inverse_temperature, hidden.dtype)
    lse, entropy = (s[:, None] for s in saved)
    d_logp, d_entropy = (g[:, None] for g in grads)
    log_p = z.float() * spec.inverse_temperature - lse
    d = -torch.exp(log_p) * (d_logp + d_entropy * (log_p + entropy))
    local, here = local_targets(targets, first, z.shape[1])
    d.scatter_add_(1, local[:, None], torch.where(here[:, None], d_logp, 0.0))
    return d.mul_(spec.inverse_temperature).to(hidden.dtype)


def add_outer(into: Tensor, d_logits: Tensor, hidden: Tensor, *, accumulate: bool) -> None:
    """into FP32 [V, H] (+)= d_logits^T hidden, products of `hidden.dtype`, sum in FP32."""
    if hidden.dtype == torch.bfloat16:
        wgrad_bf16(d_logits, hidden, out=into, accumulate=accumulate)
    else:
        into.addmm_(d_logits.t(), hidden, beta=int(accumulate))
