"""FProp, DGrad and WGrad at the layers of Qwen3-8B, Llama-3.1-8B and Qwen3-32B, against every backend there is."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jetrl_kernels.bench_lib import Case
from jetrl_kernels.gemm_fp8 import cublaslt, deepgemm, gemm_dgrad, gemm_fprop, gemm_wgrad, triton_gemm
from jetrl_kernels.gemm_fp8.dispatch import _whole_blocks
from jetrl_kernels.quant_act import quant_act, quant_act_cols
from jetrl_kernels.quant_weight import quant_weight

WEIGHTS = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "Qwen3-8B gate_up": (24576, 4096),
    "Qwen3-8B down": (4096, 12288),
    "Llama-8B gate_up": (28672, 4096),
    "Llama-8B down": (4096, 14336),
    "32B qkv": (10240, 5120),
    "32B o": (5120, 8192),
    "32B gate_up": (51200, 5120),
    "32B down": (5120, 25600),
}
TOKENS = (1, 32, 256, 4096, 8192)


def _peers_nt(a, a_scale, b, b_scale, out) -> dict:
    """Every backend on one product of 1x128 by 128x128 operands."""
    runs = {"triton": lambda: triton_gemm.gemm_nt(a, a_scale, b, b_scale, out, tiled=True)}
    if deepgemm.module() and deepgemm.accepts(a, b, out):
        runs["deepgemm"] = lambda: deepgemm.gemm_nt(a, a_scale, b, b_scale, out)
    if cublaslt.accepts(a, b):
        runs["torch scaled_mm"] = lambda: cublaslt.scaled_mm_nt(a, a_scale, b, b_scale, torch.bfloat16)
        if cublaslt.transformer_engine():
            runs["TE cuBLASLt"] = lambda: cublaslt.gemm_nt(a, a_scale, b, b_scale, out)
    return runs


def cases(weights: dict[str, tuple[int, int]] = WEIGHTS, tokens: tuple[int, ...] = TOKENS) -> Iterator[Case]:
    """One weight after another, so that only one is in memory."""
    for name, (n, k) in weights.items():
        q = quant_weight(torch.randn(n, k, device="cuda"), transposed=True)
        assert q.codes_t is not None
        for m in tokens:
            x = torch.randn(m, k, device="cuda").bfloat16()
            dy = torch.randn(m, n, device="cuda").bfloat16()
            flops, shape = 2 * m * n * k, f"{name} M={m} N={n} K={k}"
            rows, dy_rows = quant_act(x), quant_act(dy)
            out, dx = (torch.empty((m, width), dtype=torch.bfloat16, device="cuda") for width in (n, k))
            yield Case(
                "fprop",
                shape,
                lambda a=rows, q=q: gemm_fprop(*a, q.codes, q.scale),
                flops=flops,
                peers=_peers_nt(*rows, q.codes, q.scale, out),
            )
            yield Case(
                "dgrad",
                shape,
                lambda a=dy_rows, q=q: gemm_dgrad(*a, q.codes, q.scale, w_codes_t=q.codes_t),
                flops=flops,
                peers=_peers_nt(*dy_rows, q.codes_t, q.scale.t(), dx),
            )
            if m >= 128:
                dw = torch.zeros((n, k), device="cuda")
                dy_cols, x_cols = quant_act_cols(dy), quant_act_cols(x)
                yield Case(
                    "wgrad",
                    shape,
                    lambda a=dy_cols, b=x_cols, dw=dw: gemm_wgrad(a, b, out=dw),
                    flops=flops,
                    peers=_wgrad_peers(dy_cols, x_cols, dw),
                )


def _wgrad_peers(dy_cols, x_cols, dw) -> dict:
    (a, a_scale), (b, b_scale) = dy_cols, x_cols
    a, b = _whole_blocks(a), _whole_blocks(b)
    assert a is not None and b is not None
    runs = {}
    if deepgemm.module():
        runs["deepgemm"] = lambda: deepgemm.wgrad_nt(a, a_scale.t(), b, b_scale.t(), dw)
    if cublaslt.transformer_engine() and cublaslt.accepts(a, b):
        runs["TE cuBLASLt"] = lambda: cublaslt.wgrad_nt(a, a_scale, b, b_scale, dw, True)
    return runs
