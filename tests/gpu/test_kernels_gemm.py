"""GEMM kernels against the exact references, and what depends on the number of rows.

On a Hopper GPU every backend that is installed runs; with TRITON_INTERPRET=1 the Triton one runs on a CPU.
Tolerance: tensor cores keep about 14 bits below the largest product of a block, the reference all of them; 2e-3 of the
result's norm in FP32, and one BF16 rounding where the output is BF16.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOptionalSubscript=false
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from jetrl_kernels.gemm_fp8 import reference, triton_gemm
from jetrl_kernels.quant_act import reference as act
from jetrl_kernels.quant_weight import reference as tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (HOPPER or INTERPRETED), reason="needs a Hopper GPU (or TRITON_INTERPRET=1)"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = 1e-6 if INTERPRETED else 2e-3


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.cpu().double() - want.double()).norm() / want.double().norm())


def on(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """On the device, with the same strides."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=DEVICE).copy_(t) for t in tensors]


SHAPES = [(3, 130, 200), (70, 128, 256)] if INTERPRETED else [(1, 128, 128), (77, 576, 2880), (300, 1000, 520)]


@pytest.mark.parametrize("policy", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_takes_any_shape(shape, policy):
    tokens, out_features, inner = shape
    torch.manual_seed(5)
    x, w = torch.randn(tokens, inner).bfloat16(), torch.randn(out_features, inner).bfloat16()
    a, b = act.quant_act(x, policy), tiles.quant_weight(w, policy)
    want = reference.gemm_fprop(*a, *b)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((tokens, out_features), float("nan"), dtype=dtype, device=DEVICE)
        triton_gemm.gemm_nt(*on(*a), *on(*b), out, tiled=True)
        assert error(out, want) < TOLERANCE + (3e-3 if dtype == torch.bfloat16 else 0)
    dy = act.quant_act_cols(w.t()[: inner // 2].t().contiguous()[:, : inner // 2], policy)  # any [T, N] will do
    other = act.quant_act_cols(torch.randn(out_features, inner).bfloat16(), policy)
    want = reference.gemm_wgrad(*dy, *other)
    out = torch.ones(want.shape, device=DEVICE)
    codes, scale = on(*dy)
    other_codes, other_scale = on(*other)
    triton_gemm.gemm_nt(codes, scale.t(), other_codes, other_scale.t(), out, tiled=False, accumulate=True)
    assert error(out - 1, want) < TOLERANCE * 2


def test_grouped_by_expert():
    from jetrl_kernels.grouped_gemm import reference as grouped

    torch.manual_seed(6)
    experts, out_features, inner = (3, 130, 128) if INTERPRETED else (8, 640, 512)
    offsets = torch.tensor([0, 5, 5, 70]) if INTERPRETED else torch.tensor([0, 5, 5, 200, 201, 329, 500, 501, 700])
    tokens = int(offsets[-1]) + 9
    a = act.quant_act(torch.randn(tokens, inner).bfloat16(), "pow2")
    quantized = [tiles.quant_weight(torch.randn(out_features, inner), "pow2") for _ in range(experts)]
    codes, scale = (torch.stack(parts) for parts in zip(*quantized))
    want = grouped.grouped_gemm(*a, codes, scale, offsets)
    out = torch.zeros((tokens, out_features), device=DEVICE)
    triton_gemm.gemm_grouped(*on(*a), codes.to(DEVICE), scale.to(DEVICE), offsets.to(DEVICE), out)
    assert error(out, want) < TOLERANCE and not bool(out[int(offsets[-1]) :].any())


hopper_only = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
BIG = [(4096, 4096), (6144, 4096), (4096, 12288), (576, 2048), (5120, 640)]


def quantized(tokens: int, out_features: int, inner: int):
    from jetrl_kernels.quant_act import quant_act
    from jetrl_kernels.quant_weight import quant_weight

    torch.manual_seed(tokens + inner)
    x = torch.randn(tokens, inner, device="cuda").bfloat16()
    w = torch.randn(out_features, inner, device="cuda").bfloat16()
    return quant_act(x), quant_weight(w, transposed=True)


@hopper_only
@pytest.mark.parametrize("weight", BIG)
def test_fprop_against_the_reference_and_row_by_row(weight):
    from jetrl_kernels.gemm_fp8 import gemm_fprop

    (codes, scale), q = quantized(1024, *weight)
    whole = gemm_fprop(codes, scale, q.codes, q.scale)
    exact = reference.gemm_fprop(codes[:64].cpu(), scale[:64].cpu(), q.codes.cpu(), q.scale.cpu())
    assert error(whole[:64], exact) < TOLERANCE + 3e-3
    unrounded = gemm_fprop(codes, scale, q.codes, q.scale, out_dtype=torch.float32)
    assert torch.equal(unrounded.bfloat16(), whole)
    for rows in (1, 7, 31, 32, 33, 128, 256, 500):
        some = slice(1024 - rows, 1024)
        assert torch.equal(gemm_fprop(codes[some], scale[some], q.codes, q.scale), whole[some]), rows
        alone = gemm_fprop(codes[some], scale[some], q.codes, q.scale, out_dtype=torch.float32)
        assert torch.equal(alone, unrounded[some]), rows


@hopper_only
@pytest.mark.parametrize("weight", BIG)
@pytest.mark.parametrize("tokens", [1, 300, 512])
def test_dgrad_and_wgrad_against_the_reference(weight, tokens):
    from jetrl_kernels.gemm_fp8 import gemm_dgrad, gemm_wgrad
    from jetrl_kernels.quant_act import quant_act, quant_act_cols

    out_features, inner = weight
    (_, _), q = quantized(1, *weight)
    dy = torch.randn(tokens, out_features, device="cuda").bfloat16()
    x = torch.randn(tokens, inner, device="cuda").bfloat16()
    rows = quant_act(dy)
    want = reference.gemm_fprop(*(t.cpu() for t in rows), q.codes.cpu().t(), q.scale.cpu().t())
    got = gemm_dgrad(*rows, q.codes, q.scale, w_codes_t=q.codes_t)
    assert error(got, want) < TOLERANCE + 3e-3
    assert torch.equal(got, gemm_dgrad(*rows, q.codes, q.scale))
    dy_cols, x_cols = quant_act_cols(dy), quant_act_cols(x)
    want = reference.gemm_wgrad(*(t.cpu() for t in (*dy_cols, *x_cols)))
    out = torch.full((out_features, inner), float("nan"), device="cuda")
    gemm_wgrad(dy_cols, x_cols, out=out, accumulate=False)
    assert error(out, want) < TOLERANCE
    gemm_wgrad(dy_cols, x_cols, out=out)
    assert error(out, 2 * want) < TOLERANCE


@hopper_only
def test_linear_on_the_gpu_against_the_exact_one():
    from jetrl_kernels.fp8_linear import fp8_linear
    from jetrl_kernels.quant_weight import quant_weight

    torch.manual_seed(7)
    weight = torch.nn.Parameter((torch.randn(1024, 768) / 28).bfloat16())
    x, dy = torch.randn(400, 768).bfloat16(), torch.randn(400, 1024).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        for wgrad in ("fp8", "bf16"):
            w = torch.nn.Parameter(weight.detach().to(device))
            w.main_grad = torch.zeros(1024, 768, device=device)  # type: ignore[attr-defined]
            a = x.detach().to(device, copy=True).requires_grad_()
            y = fp8_linear(a, w, quant_weight(w.detach(), transposed=True), wgrad=wgrad)
            y.backward(dy.to(device))
            assert a.grad is not None
            results.append((y.detach().cpu(), a.grad.cpu(), w.main_grad.cpu()))  # type: ignore[attr-defined]
    for cpu, gpu in zip(results[:2], results[2:]):
        for want, got in zip(cpu, gpu):
            assert error(got, want) < 6e-3


LENGTHS = """
import torch
from jetrl_kernels.gemm_fp8 import deepgemm
from jetrl_kernels.quant_act import quant_act_cols
assert deepgemm.module()
out = torch.zeros(6144, 4096, device="cuda")
for tokens in (640, 1024, 1152, 2048, 5120, 7936):
    (dy, dy_scale), (x, x_scale) = (
        quant_act_cols(torch.randn(tokens, width, device="cuda").bfloat16()) for width in out.shape
    )
    deepgemm.wgrad_nt(dy, dy_scale.t(), x, x_scale.t(), out)
torch.cuda.synchronize()
"""


@hopper_only
def test_micro_batches_of_other_lengths_compile_no_wgrad_kernel(tmp_path):
    done = subprocess.run([sys.executable, "-c", LENGTHS], env=os.environ | {"DG_JIT_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0
    assert len(list(tmp_path.rglob("kernel.cubin"))) == 1
