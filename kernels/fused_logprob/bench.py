"""Log-prob and entropy with gradients, against the two-step PyTorch version."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jetrl_kernels.bench_lib import Case
from jetrl_kernels.fused_logprob import fused_logprob


def two_step(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, entropy: bool):
    """log_softmax over all logits at once, in FP32."""
    logp = torch.log_softmax(torch.nn.functional.linear(hidden, head).float(), -1)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(-1) if entropy else chosen.detach()


def cases() -> Iterator[Case]:
    """Qwen3-8B's head (151936 x 4096), 4096 tokens, gradients of hidden and head."""
    tokens, vocab, width = 4096, 151936, 4096
    hidden = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    head = (torch.randn(vocab, width, device="cuda") / 64).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")

    def run(function) -> None:
        hidden.grad = head.grad = None
        logp, entropy = function()
        (logp.sum() + 0.01 * entropy.sum()).backward()

    for dtype in (torch.bfloat16, torch.float32):
        yield Case(
            f"fused_logprob fwd+bwd (log-prob and entropy), logits in {str(dtype).removeprefix('torch.')}",
            f"{tokens} x {vocab}, H={width}",
            lambda dtype=dtype: run(lambda: fused_logprob(hidden, head, targets, logits_dtype=dtype)),
            flops=6 * tokens * vocab * width,
            peers={
                "two-step": lambda: run(lambda: two_step(hidden, head, targets, True)),
                "two-step, log-prob only": lambda: run(lambda: two_step(hidden, head, targets, False)),
            },
            target="no slower than two-step",
            graph=False,
        )


def peak_bytes(tokens: int, vocab: int, width: int = 1024) -> int:
    """Peak of allocated memory above inputs and gradients' own size, of one forward + backward."""
    hidden = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    head = torch.randn(vocab, width, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, entropy = fused_logprob(hidden, head, targets)
    (logp.sum() + entropy.sum()).backward()
    grads = hidden.numel() * 2 + head.numel() * (2 + 4)
    return torch.cuda.max_memory_allocated() - before - grads
