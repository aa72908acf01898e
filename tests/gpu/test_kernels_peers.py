"""Bit equality with Transformer Engine's and vLLM's own quantizers and GEMMs under `pow2`, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from jetrl_kernels import peers

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
needs_te = pytest.mark.skipif(not HOPPER or peers.te_torch() is None, reason="needs Transformer Engine")
needs_vllm = pytest.mark.skipif(not HOPPER or peers.vllm_ops() is None, reason="needs vLLM's CUDA kernels")

KINDS = ["normal", "heavy", "gradient", "ties", "zero rows"]


def inputs(rows: int, cols: int, kind: str) -> torch.Tensor:
    """BF16 whose groups lie above vLLM's floor (scale 1e-10, amax 4.5e-8), but for the zero rows of one kind."""
    torch.manual_seed(11)
    x = torch.randn(rows, cols, device="cuda")
    if kind == "heavy":
        x = torch.distributions.StudentT(1.5).sample((rows, cols)).cuda()
    elif kind == "gradient":
        x = x * 1e-6
    elif kind == "ties":
        x = torch.randint(-64, 65, (rows, cols), device="cuda") * 7 * 2.0**-3  # 448 / 2**k among them
    elif kind == "zero rows":
        x[::2] = 0
    return x.bfloat16()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@needs_vllm
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "zero rows"])
@pytest.mark.parametrize("rows", [1, 31, 32, 256, 4096])
def test_activations_as_vllm(kind, rows):
    from jetrl_kernels.quant_act import quant_act

    x = inputs(rows, 4096, kind)
    run = peers.vllm_group_quant(x)
    assert run is not None
    codes, scale = run()
    ours, our_scale = quant_act(x)
    assert torch.equal(scale, our_scale) and same(codes, ours)
    assert scale.stride() == our_scale.stride()


@needs_te
@pytest.mark.parametrize("kind", KINDS)
def test_activations_as_te(kind):
    from jetrl_kernels.quant_act import quant_act_both

    x = inputs(1024, 4096, kind)
    run = peers.te_quantize(x, tile=False, row=True, col=True)
    assert run is not None
    theirs = run()
    (codes, scale), (codes_t, scale_t) = quant_act_both(x)
    above = x.abs().view(1024, 32, 128).amax(-1) > 0  # TE's scale of a zero group is 1, ours the smallest
    their_scale = theirs._rowwise_scale_inv[:, :1024].t()
    assert torch.equal(their_scale[above], scale[above])
    assert same(theirs._rowwise_data, codes.view(torch.uint8))
    above_t = x.abs().view(8, 128, 4096).amax(1) > 0
    assert torch.equal(theirs._columnwise_scale_inv[:, :4096][above_t], scale_t[above_t])
    assert same(theirs._columnwise_data, codes_t.view(torch.uint8))


@needs_te
@pytest.mark.parametrize("kind", KINDS)
def test_weights_as_te(kind):
    from jetrl_kernels.quant_weight import quant_weight

    w = inputs(1536, 9472, kind)  # 74 tiles in a row: TE pads its scales to 76
    run = peers.te_quantize(w, tile=True, row=True, col=True)
    assert run is not None
    theirs, ours = run(), quant_weight(w, transposed=True)
    assert ours.codes_t is not None
    assert torch.equal(theirs._rowwise_scale_inv[:, :74], ours.scale)
    assert same(theirs._rowwise_data, ours.codes.view(torch.uint8))
    assert same(theirs._columnwise_data, ours.codes_t.view(torch.uint8))


@pytest.mark.parametrize("weight", [(4096, 4096), (6144, 4096), (4096, 12288), (24576, 4096)])
@pytest.mark.parametrize("tokens", [16, 128, 1024])
def test_every_gemm_backend_gives_the_same_bits(weight, tokens):
    from jetrl_kernels.gemm_fp8 import cublaslt, deepgemm, triton_gemm
    from jetrl_kernels.quant_act import quant_act
    from jetrl_kernels.quant_weight import quant_weight

    n, k = weight
    torch.manual_seed(12)
    a = quant_act(torch.randn(tokens, k, device="cuda").bfloat16())
    q = quant_weight(torch.randn(n, k, device="cuda"))
    out = torch.empty((tokens, n), dtype=torch.bfloat16, device="cuda")
    want = triton_gemm.gemm_nt(*a, q.codes, q.scale, out, tiled=True).clone()
    if deepgemm.module():
        assert torch.equal(deepgemm.gemm_nt(*a, q.codes, q.scale, out.fill_(7)), want)
        unrounded = deepgemm.gemm_nt_fp32(*a, q.codes, q.scale, torch.empty_like(out, dtype=torch.float32))
        assert torch.equal(unrounded.bfloat16(), want)
    if k == 4096 and tokens >= 128:  # deeper, or with few rows, cuBLASLt may split K
        assert torch.equal(cublaslt.scaled_mm_nt(*a, q.codes, q.scale, torch.bfloat16), want)
        if cublaslt.transformer_engine():
            assert torch.equal(cublaslt.gemm_nt(*a, q.codes, q.scale, out.fill_(7)), want)


def test_wgrad_backends_agree():
    from jetrl_kernels.gemm_fp8 import cublaslt, deepgemm, triton_gemm
    from jetrl_kernels.quant_act import quant_act_cols

    torch.manual_seed(13)
    dy, x = (quant_act_cols(torch.randn(1024, width, device="cuda").bfloat16()) for width in (1536, 1024))
    want = torch.zeros((1536, 1024), device="cuda")
    triton_gemm.gemm_nt(dy[0], dy[1].t(), x[0], x[1].t(), want, tiled=False)
    if deepgemm.module():
        got = deepgemm.wgrad_nt(dy[0], dy[1].t(), x[0], x[1].t(), torch.zeros_like(want))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)
    if cublaslt.transformer_engine():
        for start, accumulate in ((torch.zeros_like(want), False), (want.clone(), True)):
            expected = 2 * want if accumulate else want
            got = cublaslt.wgrad_nt(dy[0], dy[1], x[0], x[1], start, accumulate)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)


def test_grouped_deepgemm_gives_the_bits_of_triton():
    from jetrl_kernels.gemm_fp8 import deepgemm
    from jetrl_kernels.grouped_gemm import grouped_gemm
    from jetrl_kernels.quant_act import quant_act
    from jetrl_kernels.quant_weight import quant_weight

    if not deepgemm.module():
        pytest.skip("needs DeepGEMM")
    torch.manual_seed(14)
    experts, n, k = 8, 1536, 2048
    counts = torch.tensor([128, 0, 384, 128, 256, 0, 128, 128])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).cuda()
    a = quant_act(torch.randn(int(counts.sum()), k, device="cuda").bfloat16())
    quantized = [quant_weight(torch.randn(n, k, device="cuda")) for _ in range(experts)]
    codes, scale = torch.stack([q.codes for q in quantized]), torch.stack([q.scale for q in quantized])
    aligned = grouped_gemm(*a, codes, scale, offsets, aligned=True)
    assert torch.equal(aligned, grouped_gemm(*a, codes, scale, offsets))
