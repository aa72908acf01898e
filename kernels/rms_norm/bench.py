"""RMSNorm into BF16 and FP8, with residual, and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jetrl_kernels import peers
from jetrl_kernels.bench_lib import Case
from jetrl_kernels.rms_norm import kernel

TOKENS = 16384


def cases() -> Iterator[Case]:
    """Hidden sizes of 8B and 32B models."""
    for hidden in (4096, 5120):
        x, residual, dy = (torch.randn(TOKENS, hidden, device="cuda").bfloat16() for _ in range(3))
        weight = torch.randn(hidden, device="cuda").bfloat16()
        elements, shape = x.numel(), f"{TOKENS} x {hidden}"
        rstd = torch.rand(TOKENS, device="cuda") + 0.5
        added = residual.clone()

        def run(residual=None, x=x, weight=weight, **forms):
            return kernel.forward(x, weight, 1e-6, residual=residual, bf16=False, **forms)

        yield Case(
            "rms_norm -> FP8 row-wise",
            shape,
            lambda run=run: run(row=True),
            bytes=3 * elements,
            peers=peers.present(
                vLLM=peers.vllm_norm_quant(x, weight, None), TE=peers.te_norm_quant(x, weight, row=True, col=False)
            ),
            target="0.90 of copy",
        )
        yield Case(
            "residual + rms_norm -> FP8 row-wise",
            shape,
            lambda run=run, r=residual: run(r, row=True),
            bytes=7 * elements,
            peers=peers.present(vLLM=peers.vllm_norm_quant(x, weight, added)),
            target="0.90 of copy",
        )
        yield Case(
            "rms_norm -> FP8 row- and column-wise",
            shape,
            lambda run=run: run(row=True, col=True),
            bytes=4 * elements,
            peers=peers.present(TE=peers.te_norm_quant(x, weight, row=True, col=True)),
            target="0.70 of copy",
        )
        yield Case(
            "residual + rms_norm -> FP8 row- and column-wise",
            shape,
            lambda run=run, r=residual: run(r, row=True, col=True),
            bytes=8 * elements,
            target="0.70 of copy",
        )
        tex = peers.te_torch()
        yield Case(
            "rms_norm backward",
            shape,
            lambda a=(dy, x, weight, rstd): kernel.backward(*a),
            bytes=6 * elements,
            peers=peers.present(
                TE=tex and (lambda a=(dy, x, rstd, weight), tex=tex: tex.rmsnorm_bwd(*a, 0, False)),
            ),
        )
        yield Case(
            "rms_norm backward + residual's gradient",
            shape,
            lambda a=(dy, x, weight, rstd, residual): kernel.backward(*a),
            bytes=8 * elements,
        )
