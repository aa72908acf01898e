"""Weight quantizer, from BF16 and from the FP32 master, with and without the transposed codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jetrl_kernels import peers
from jetrl_kernels.bench_lib import Case
from jetrl_kernels.quant_weight import quant_weight


def cases() -> Iterator[Case]:
    """gate_up and down of Qwen3-8B."""
    for out_features, in_features in ((24576, 4096), (4096, 12288)):
        master = torch.randn(out_features, in_features, device="cuda")
        w = master.bfloat16()
        elements, shape = w.numel(), f"{out_features} x {in_features}"
        te, te_both = (peers.te_quantize(w, tile=True, row=True, col=col) for col in (False, True))
        yield Case(
            "quant_weight BF16",
            shape,
            lambda w=w: quant_weight(w),
            bytes=3 * elements,
            peers=peers.present(TE=te),
            target="0.90 of copy",
        )
        yield Case(
            "quant_weight BF16, transposed too",
            shape,
            lambda w=w: quant_weight(w, transposed=True),
            bytes=4 * elements,
            peers=peers.present(TE=te_both),
            target="0.70 of copy",
        )
        yield Case(
            "quant_weight FP32 (through BF16)",
            shape,
            lambda m=master: quant_weight(m),
            bytes=5 * elements,
            target="0.90 of copy",
        )
