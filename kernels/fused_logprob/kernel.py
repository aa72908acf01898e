"""Softmax statistics and the gradient of a chunk of logits in Triton: one read, and one write in place."""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH, WARPS = 2048, 4


@triton.jit
def _statistics_kernel(
    z_ptr, target_ptr, out_ptr, vocab, stride, tokens, vocab_start, inverse_temperature, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    # Running maximum: one number for the row. Masked lanes hold a number so low that their weight is exactly 0.
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    moment = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, vocab, WIDTH):
        c = start + tl.arange(0, WIDTH)
        z = tl.load(z_ptr + row * stride + c, mask=c < vocab, other=-1e30).to(tl.float32) * inverse_temperature
        higher = tl.maximum(top, tl.max(z, axis=0))
        rescale = tl.exp(top - higher)
        weight = tl.exp(z - higher)
        total = total * rescale + weight
        moment = moment * rescale + weight * z
        top = higher
    local = tl.load(target_ptr + row) - vocab_start
    here = (local >= 0) & (local < vocab)
    chosen = tl.load(z_ptr + row * stride + tl.where(here, local, 0)).to(tl.float32) * inverse_temperature
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + tokens + row, tl.sum(total, axis=0))
    tl.store(out_ptr + 2 * tokens + row, tl.sum(moment, axis=0))
    tl.store(out_ptr + 3 * tokens + row, tl.where(here, chosen, 0.0))


# The next two are operation by operation what vLLM 0.26 runs when it samples: `_temperature_kernel` and
# `_topk_log_softmax_kernel` in vllm/v1/worker/gpu/sample (Apache-2.0). The bits of a sum follow block, warps and the
# order of the loop; in one kernel the division (a product with a reciprocal) would melt into the subtraction behind it.
@triton.jit
def _divide_kernel(z_ptr, vocab, stride, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * stride + c, mask=c < vocab).to(tl.float32)
    tl.store(z_ptr + row * stride + c, z / temperature, mask=c < vocab)


@triton.jit
def _token_logprob_kernel(z_ptr, target_ptr, out_ptr, vocab, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = z_ptr + row * stride
    top = float("-inf")
    for start in range(0, vocab, BLOCK):
        c = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + c, mask=c < vocab, other=float("-inf")).to(tl.float32)
        top = tl.max(tl.maximum(z, top))
    total = 0.0
    for start in range(0, vocab, BLOCK):
        c = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + c, mask=c < vocab, other=0.0).to(tl.float32)
        e = tl.exp(z - top)
        e = tl.where(c < vocab, e, 0.0)
        total += tl.sum(e)
    chosen = tl.load(row_ptr + tl.load(target_ptr + row)).to(tl.float32)
    tl.store(out_ptr + row, chosen - top - tl.log(total))


@triton.jit
def _gradient_kernel(
    z_ptr,
    out_ptr,
    target_ptr,
    lse_ptr,
    entropy_ptr,
    d_logp_ptr,
    d_entropy_ptr,
    vocab,
    stride,
    vocab_start,
    inverse_temperature,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    z = tl.load(z_ptr + row * stride + c, mask=c < vocab, other=0.0).to(tl.float32)
    log_p = z * inverse_temperature - tl.load(lse_ptr + row)
    d_logp = tl.load(d_logp_ptr + row)
    d = -tl.exp(log_p) * (d_logp + tl.load(d_entropy_ptr + row) * (log_p + tl.load(entropy_ptr + row)))
    d += tl.where(c == tl.load(target_ptr + row) - vocab_start, d_logp, 0.0)
    d *= inverse_temperature
    tl.store(out_ptr + row * stride + c, d.to(out_ptr.dtype.element_ty), mask=c < vocab)


def statistics(z: Tensor, targets: Tensor, vocab_start: int, inverse_temperature: float) -> Tensor:
    """FP32 [4, t] as `chunk.statistics`, from logits `z` [t, V]."""
    tokens, vocab = z.shape
    out = torch.empty((4, tokens), dtype=torch.float32, device=z.device)
    _statistics_kernel[(tokens,)](
        z, targets, out, vocab, z.stride(0), tokens, vocab_start, inverse_temperature, WIDTH, num_warps=WARPS
    )
    return out


def token_logprob(z: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """FP32 [t]: log-prob of each target under softmax(z / temperature), z [t, V], as vLLM's sampler computes it.

    At a temperature other than 1, z / temperature takes the place of z.
    """
    tokens, vocab = z.shape
    out = torch.empty(tokens, dtype=torch.float32, device=z.device)
    if tokens and temperature != 1.0:
        _divide_kernel[(tokens, triton.cdiv(vocab, 8192))](z, vocab, z.stride(0), temperature, BLOCK=8192)
    if tokens:
        _token_logprob_kernel[(tokens,)](z, targets, out, vocab, z.stride(0), BLOCK=1024)
    return out


def gradient(
    z: Tensor,
    targets: Tensor,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    vocab_start: int,
    inverse_temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """d logits [t, V] of `dtype` as `chunk.grad_logits`; overwrites `z` if it has that dtype."""
    tokens, vocab = z.shape
    out = z if z.dtype == dtype else torch.empty_like(z, dtype=dtype)
    lse, entropy, d_logp, d_entropy = (t.contiguous() for t in (*saved, *grads))
    _gradient_kernel[(tokens, triton.cdiv(vocab, WIDTH))](
        z,
        out,
        targets,
        lse,
        entropy,
        d_logp,
        d_entropy,
        vocab,
        z.stride(0),
        vocab_start,
        inverse_temperature,
        WIDTH,
        num_warps=WARPS,
    )
    return out
