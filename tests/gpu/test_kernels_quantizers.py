"""Quantizer kernels against the references, bit for bit.

On a Hopper GPU these run the kernels; with TRITON_INTERPRET=1 the same on a CPU in Triton's interpreter.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOptionalSubscript=false
from __future__ import annotations

import math
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (HOPPER or INTERPRETED), reason="needs a Hopper GPU (or TRITON_INTERPRET=1)"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equal, NaN included, wherever they are."""
    flat = [t.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and torch.equal(*flat)


def inputs(rows: int, cols: int, kind: str) -> torch.Tensor:
    """BF16 [rows, cols] on the CPU, of one kind."""
    torch.manual_seed(rows * 7 + cols)
    x = torch.randn(rows, cols)
    if kind == "heavy":
        x = torch.distributions.StudentT(1.5).sample((rows, cols))
    elif kind == "tiny":
        x = x * 1e-38
    elif kind == "subnormal":
        x = x * 1e-40
    elif kind == "gradient":
        x = x * 10.0 ** torch.randint(-12, -3, (rows, 1))
    elif kind == "huge":
        x = x.sign() * 3e38 * torch.rand(rows, cols)
    elif kind == "zeros":
        x = torch.zeros(rows, cols)
        x[::3, ::5] = -0.0
    elif kind == "codes":
        codes = torch.arange(256, dtype=torch.uint8).repeat(rows * cols // 256 + 1)[: rows * cols]
        codes = torch.where((codes & 0x7F) == 0x7F, 0x80, codes)
        x = codes.view(torch.float8_e4m3fn).float().view(rows, cols)
    elif kind == "nonfinite":
        x[0, 0], x[-1, -1], x[rows // 2, cols // 2] = math.nan, math.inf, -math.inf
    return x.bfloat16()


KINDS = ["normal", "heavy", "tiny", "subnormal", "gradient", "huge", "zeros", "codes", "nonfinite"]
SHAPES = [(1, 128), (3, 200), (130, 264)] if INTERPRETED else [(1, 128), (31, 200), (144, 7168), (500, 1024), (7, 130)]


@pytest.mark.parametrize("policy", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_quantizers(kind, shape, policy):
    from jetrl_kernels.quant_act import kernel, reference

    x = inputs(*shape, kind)
    want, want_t = reference.quant_act(x, policy), reference.quant_act_cols(x, policy)
    rows, cols = kernel.quant_act_both(x.to(DEVICE), policy)
    alone, alone_t = kernel.quant_act(x.to(DEVICE), policy), kernel.quant_act_cols(x.to(DEVICE), policy)
    for got, expected in ((rows, want), (alone, want), (cols, want_t), (alone_t, want_t)):
        assert same(got[1], expected[1]), "scales differ"
        assert same(got[0], expected[0]), "codes differ"
    assert rows[1].stride() == want[1].stride()


@pytest.mark.parametrize("policy", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weight_quantizer(kind, shape, policy):
    from jetrl_kernels.quant_weight import kernel, reference

    w = inputs(*shape, kind)
    codes, scale = reference.quant_weight(w, policy)
    for source in (w, w.float()):
        got, got_scale, got_t = kernel.quantize_tiles(source.to(DEVICE), policy, transposed=True)
        assert got_t is not None
        assert same(got_scale, scale) and same(got, codes) and same(got_t, codes.t())


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("mode", ["identity", "weight"])
def test_cuda_and_triton_tiles_agree(mode, monkeypatch):
    """The CUDA C++ kernel runs where it should, and its bits are those of the Triton kernel that replaces it."""
    from jetrl_kernels import tile_quant
    from jetrl_kernels.quant_act import kernel
    from jetrl_kernels.quant_weight import kernel as tiles

    x = inputs(400, 1032, "nonfinite").cuda()
    assert tile_quant.accepts(mode, 1032, x)
    results = []
    for use in (True, False):
        if not use:
            monkeypatch.setattr(tile_quant, "accepts", lambda *args: False)
        if mode == "weight":
            results.append(tiles.quantize_tiles(x, "pow2", transposed=True))
        else:
            results.append([t for pair in kernel.quant_act_both(x, "pow2") for t in pair])
    assert all(same(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("stochastic", [None, (3, 2**31 + 5, 77)])
@pytest.mark.parametrize("position", [(0, 0, 0), (5, 24, 1024), (2**30, 3, 1031)])
def test_master_cast_and_one_pass_tiles(stochastic, position):
    from jetrl_kernels.master_cast import kernel, reference
    from jetrl_kernels.quant_weight import kernel as tiles
    from jetrl_kernels.quant_weight import reference as tile_reference

    shape = (9, 264) if INTERPRETED else (333, 1000)
    x = torch.randn(shape)
    x[0, :6] = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 3.4e38, 1e-40])
    row0, col0, width = position
    width = width or shape[1]
    want = reference.stochastic(x, stochastic, row0, col0, width) if stochastic else x.bfloat16()
    out = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    kernel.cast(x.to(DEVICE), out, stochastic, (row0, col0, width))
    assert same(out, want)
    out.fill_(math.nan)
    codes, scale, _ = tiles.quantize_tiles(
        x.to(DEVICE), "pow2", bf16_out=out, stochastic=stochastic, position=(row0, col0, width)
    )
    assert same(out, want)
    want_codes, want_scale = tile_reference.quant_weight(want, "pow2")
    assert same(codes, want_codes) and same(scale, want_scale)
