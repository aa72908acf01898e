"""FP8 linear, forward + backward with quantization, against TE's BF16 and FP8 linear; and the parts of its time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from jetrl_kernels import peers
from jetrl_kernels.bench_lib import Case
from jetrl_kernels.fp8_linear import fp8_linear
from jetrl_kernels.gemm_fp8 import gemm_dgrad, gemm_fprop, gemm_wgrad
from jetrl_kernels.quant_act import quant_act_both
from jetrl_kernels.quant_weight import quant_weight

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TOKENS = 8192


def _te_linear(n: int, k: int, x: torch.Tensor, dy: torch.Tensor, fp8: bool) -> Any:
    if peers.te_torch() is None:
        return None
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    layer = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, device="cuda")
    layer.weight.main_grad = torch.zeros((n, k), device="cuda")
    recipe = Float8BlockScaling()

    def run() -> None:
        with te.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
            y = layer(x, is_first_microbatch=None)
        y.backward(dy)
        layer.weight.grad = x.grad = None

    return run


def cases() -> Iterator[Case]:
    """The four linears of Qwen3-8B at 8192 tokens. FP32 main_grad accumulation on both sides."""
    for name, (n, k) in LAYERS.items():
        x = torch.randn(TOKENS, k, device="cuda").bfloat16().requires_grad_()
        dy = torch.randn(TOKENS, n, device="cuda").bfloat16()
        weight = torch.nn.Parameter(torch.randn(n, k, device="cuda").bfloat16())
        weight.main_grad = torch.zeros((n, k), device="cuda")  # type: ignore[attr-defined]
        q = quant_weight(weight.detach(), transposed=True)
        flops, shape = 6 * TOKENS * n * k, f"{name} {k} -> {n}, {TOKENS} tokens"

        def run(wgrad: str = "fp8", requantize: bool = False, x=x, dy=dy, weight=weight, q=q) -> None:
            bytes_ = quant_weight(weight.detach(), transposed=True) if requantize else q
            fp8_linear(x, weight, bytes_, wgrad=wgrad).backward(dy)
            weight.grad = x.grad = None

        te_peers = peers.present(
            TE_BF16=_te_linear(n, k, x, dy, False),
            TE_FP8=_te_linear(n, k, x, dy, True),
        )
        yield Case("fp8_linear fwd+bwd", shape, run, flops=flops, peers=te_peers, target="1.41x TE BF16")
        yield Case("fp8_linear fwd+bwd, eager", shape, run, flops=flops, peers=te_peers, graph=False)
        yield Case(
            "fp8_linear fwd+bwd + weight quantization",
            shape,
            lambda run=run: run(requantize=True),
            flops=flops,
            peers=te_peers,
        )
        yield Case("fp8_linear fwd+bwd, BF16 wgrad", shape, lambda run=run: run("bf16"), flops=flops, peers=te_peers)
        a, b = quant_act_both(x), quant_act_both(dy)
        main_grad = weight.main_grad  # type: ignore[attr-defined]
        third = flops // 3
        yield Case("part: quantize x", shape, lambda x=x: quant_act_both(x))
        yield Case("part: fprop", shape, lambda a=a, q=q: gemm_fprop(*a[0], q.codes, q.scale), flops=third)
        yield Case("part: quantize dy", shape, lambda dy=dy: quant_act_both(dy))
        yield Case(
            "part: dgrad",
            shape,
            lambda b=b, q=q: gemm_dgrad(*b[0], q.codes, q.scale, w_codes_t=q.codes_t),
            flops=third,
        )
        yield Case("part: wgrad", shape, lambda a=a, b=b, g=main_grad: gemm_wgrad(b[1], a[1], out=g), flops=third)
