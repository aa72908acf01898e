"""SwiGLU into BF16 and FP8, and its backward into FP8."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jetrl_kernels import peers
from jetrl_kernels.bench_lib import Case
from jetrl_kernels.swiglu import kernel


def cases() -> Iterator[Case]:
    """Feed-forward sizes of Qwen3-8B and Qwen3-32B."""
    for tokens, ffn in ((8192, 12288), (8192, 25600)):
        gate_up = torch.randn(tokens, 2 * ffn, device="cuda").bfloat16()
        dy = torch.randn(tokens, ffn, device="cuda").bfloat16()
        elements, shape = dy.numel(), f"{tokens} x {ffn}"

        def run(gate_up=gate_up, bf16=False, row=False, col=False):
            return kernel.forward(gate_up, "pow2", bf16=bf16, row=row, col=col)

        yield Case("swiglu -> BF16", shape, lambda run=run: run(bf16=True), bytes=6 * elements, target="0.90 of copy")
        yield Case(
            "swiglu -> FP8 row-wise",
            shape,
            lambda run=run: run(row=True),
            bytes=5 * elements,
            peers=peers.present(TE=peers.te_swiglu_quant(gate_up, row=True, col=False)),
            target="0.90 of copy",
        )
        yield Case(
            "swiglu -> FP8 row- and column-wise",
            shape,
            lambda run=run: run(row=True, col=True),
            bytes=6 * elements,
            peers=peers.present(TE=peers.te_swiglu_quant(gate_up, row=True, col=True)),
            target="0.70 of copy",
        )
        yield Case(
            "swiglu backward -> FP8 row- and column-wise",
            shape,
            lambda a=(dy, gate_up): kernel.backward(*a, "pow2", bf16=False, row=True, col=True),
            bytes=10 * elements,
            peers=peers.present(TE=peers.te_swiglu_backward_quant(dy, gate_up)),
            target="0.70 of copy",
        )
