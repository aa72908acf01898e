"""Activation quantizers at the sizes of 8B and 32B models: bytes moved against copy, TE and vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jetrl_kernels import peers
from jetrl_kernels.bench_lib import Case
from jetrl_kernels.quant_act import quant_act, quant_act_both

SHAPES = [(8192, 4096), (8192, 12288), (8192, 24576), (8192, 25600)]


def cases() -> Iterator[Case]:
    """Row-wise, then row- and column-wise."""
    for tokens, channels in SHAPES:
        x = torch.randn(tokens, channels, device="cuda").bfloat16()
        elements, shape = x.numel(), f"{tokens} x {channels}"
        yield Case(
            "quant_act row-wise",
            shape,
            lambda x=x: quant_act(x),
            bytes=3 * elements + elements // 32,
            peers=peers.present(
                vLLM=peers.vllm_group_quant(x), TE=peers.te_quantize(x, tile=False, row=True, col=False)
            ),
            target="0.90 of copy",
        )
        yield Case(
            "quant_act row- and column-wise",
            shape,
            lambda x=x: quant_act_both(x),
            bytes=4 * elements + elements // 16,
            peers=peers.present(TE=peers.te_quantize(x, tile=False, row=True, col=True)),
            target="0.70 of copy",
        )
