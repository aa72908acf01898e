"""Log-prob and entropy of given tokens from hidden states and lm_head, without a [tokens, vocabulary] tensor.

The head's matmul and softmax statistics run over chunks of tokens whose logits take at most `CHUNK_LOGITS` elements,
whatever the number of tokens and the vocabulary. The backward recomputes logits and runs over chunks of the vocabulary:
so the gradient of lm_head, which may be gigabytes, is read and written once and not once a chunk. The vocabulary may be
split over the ranks of a process group (rows of lm_head), with padding rows at its end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_kernels.fused_logprob import chunk

__all__ = ["CHUNK_LOGITS", "fused_logprob"]

CHUNK_LOGITS = 1 << 28
"""Logits of one chunk: 512 MiB in BF16."""


def fused_logprob(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    group: Any = None,
    logits_dtype: torch.dtype = torch.bfloat16,
    chunk_logits: int = CHUNK_LOGITS,
    whole: bool = True,
) -> tuple[Tensor, Tensor]:
    """Natural log-prob of `targets` and entropy in nats of softmax(logits / temperature).

    Args:
        hidden: [T, H] BF16 or FP32.
        lm_head: [V_local, H], rows vocab_start ... of the head; cast to `hidden.dtype`. If it has a `main_grad` (FP32)
            the gradient is added there, as in `fp8_linear`.
        targets: [T] int64, ids in [0, vocab_size).
        vocab_start: id of the first local row. vocab_size: true size; rows past it are padding and never count.
        temperature: > 0.
        group: torch process group over which the vocabulary is split; None for no split.
            All ranks pass the same hidden and targets; the gradient of `hidden` is the local part, to be summed over
            the group by the caller (as for any column-parallel layer).
        logits_dtype: BF16 rounds logits as an engine's head does (`F.linear`); FP32 keeps the accumulators.
        chunk_logits: bound on the elements of a chunk's logits.
        whole: log-probs by the engine's own log-softmax, bit for bit; of a split vocabulary, each chunk's logits are
            gathered for it. False: from each rank's maximum and sum, which only those numbers cross ranks for.

    Returns:
        logp FP32 [T], entropy FP32 [T]; both differentiable.

    Raises:
        ValueError: shapes that do not fit, temperature <= 0, or a vocabulary range with no row.
    """
    if hidden.dim() != 2 or lm_head.dim() != 2 or hidden.shape[1] != lm_head.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and lm_head {tuple(lm_head.shape)} do not fit")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)} must be one id for each of {hidden.shape[0]} tokens")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if logits_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"logits_dtype is bfloat16 or float32, not {logits_dtype}")
    rows = lm_head.shape[0]
    size = vocab_start + rows if vocab_size is None else vocab_size
    valid = min(rows, size - vocab_start)
    if valid <= 0 and group is None:
        raise ValueError(f"no row of the vocabulary: it has {size} ids, the first local row is {vocab_start}")
    spec = chunk.Spec(vocab_start, max(valid, 0), rows, size, temperature, group, logits_dtype, chunk_logits, whole)
    return _FusedLogprob.apply(hidden, lm_head, targets, spec)


class _FusedLogprob(torch.autograd.Function):
    """Saves hidden, targets and two FP32 numbers for each token; recomputes logits in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, lm_head: Tensor, targets: Tensor, spec: chunk.Spec) -> tuple[Tensor, Tensor]:
        head = lm_head.detach()[: spec.rows].to(hidden.dtype)
        # Rows of stats: max, sum of exp(z - max), sum of exp(z - max) * z, logit of the target (0 if not local).
        stats = torch.empty(4, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        logp = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for span in spec.spans(hidden.shape[0]):
            z = chunk.logits(hidden[span], head, spec)
            stats[:, span] = chunk.statistics(z, targets[span], spec)
            if spec.whole:
                logp[span] = chunk.whole_logprob(z, targets[span], spec)
        if spec.group is not None:
            local_max = stats[0].clone()
            dist.all_reduce(stats[0], dist.ReduceOp.MAX, group=spec.group)
            rescale = torch.exp(local_max - stats[0])
            stats[1:3] *= rescale
            sums = stats[1:].contiguous()
            dist.all_reduce(sums, group=spec.group)
            stats[1:] = sums
        lse = stats[0] + torch.log(stats[1])
        mean_logit = stats[2] / stats[1]
        entropy = lse - mean_logit
        ctx.save_for_backward(hidden, lm_head, targets, lse, entropy)
        ctx.spec = spec
        return logp if spec.whole else stats[3] - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lm_head, targets, lse, entropy = ctx.saved_tensors
        spec: chunk.Spec = ctx.spec
        head = lm_head.detach()[: spec.rows].to(hidden.dtype)
        d_logp, d_entropy = (g.float() for g in grads)
        needs_dh, needs_dw = ctx.needs_input_grad[:2]
        main_grad = getattr(lm_head, "main_grad", None)
        d_hidden = None
        d_head = None
        if needs_dw:
            d_head = main_grad if main_grad is not None else lm_head.new_empty(lm_head.shape, dtype=torch.float32)
            if main_grad is None:
                d_head[spec.rows if hidden.shape[0] else 0 :].zero_()
        for span in spec.vocabulary_spans(hidden.shape[0]):
            d_logits = chunk.grad_logits(hidden, head, targets, (lse, entropy), (d_logp, d_entropy), span, spec)
            if needs_dh and span == slice(0, spec.rows):
                d_hidden = d_logits @ head
            elif needs_dh:
                if d_hidden is None:
                    d_hidden = hidden.new_empty(hidden.shape, dtype=torch.float32)
                chunk.add_outer(d_hidden, d_logits.t(), head[span], accumulate=span.start > 0)
            if d_head is not None:
                chunk.add_outer(d_head[span], d_logits, hidden, accumulate=main_grad is not None)
        if needs_dh:
            d_hidden = torch.zeros_like(hidden) if d_hidden is None else d_hidden.to(hidden.dtype)
        if d_head is None:
            return d_hidden, None, None, None
        if main_grad is None:
            return d_hidden, d_head.to(lm_head.dtype), None, None
        lm_head.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(lm_head, "zero_out_wgrad", False) else torch.empty_like
        return d_hidden, make(lm_head), None, None
