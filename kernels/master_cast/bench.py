"""FP32 master to BF16, and on to FP8 tiles in the same pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jetrl_kernels.bench_lib import Case
from jetrl_kernels.master_cast import master_cast, master_quant


def cases() -> Iterator[Case]:
    """gate_up of Qwen3-8B."""
    master = torch.randn(24576, 4096, device="cuda")
    out = torch.empty(master.shape, dtype=torch.bfloat16, device="cuda")
    elements, shape = master.numel(), "24576 x 4096"
    yield Case(
        "master_cast stochastic",
        shape,
        lambda: master_cast(master, "stochastic", seed=3, step=5, out=out),
        bytes=6 * elements,
        peers={"torch nearest": lambda: out.copy_(master)},
        target="0.90 of copy",
    )
    yield Case(
        "master_quant nearest (BF16 + FP8)",
        shape,
        lambda: master_quant(master),
        bytes=7 * elements,
        target="0.90 of copy",
    )
    yield Case(
        "master_quant stochastic (BF16 + FP8)",
        shape,
        lambda: master_quant(master, "pow2", "stochastic", seed=3, step=5),
        bytes=7 * elements,
        target="0.90 of copy",
    )
