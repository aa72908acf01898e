"""Block-scaled GEMM references: exactness, batch invariance, order of accumulation."""

import pytest
import torch

from jetrl_kernels.gemm_fp8 import gemm_dgrad, gemm_fprop, gemm_wgrad
from jetrl_kernels.quant_act import dequant_act, dequant_act_cols, quant_act, quant_act_cols
from jetrl_kernels.quant_weight import dequant_weight, quant_weight


def operands(shape: tuple[int, int, int], policy: str = "pow2"):
    tokens, out, inp = shape
    generator = torch.Generator().manual_seed(tokens + out + inp)
    x = torch.randn(tokens, inp, generator=generator).bfloat16()
    w = torch.randn(out, inp, generator=generator).bfloat16()
    return quant_act(x, policy), quant_weight(w, policy)


@pytest.mark.parametrize("policy", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(5, 128, 128), (17, 192, 320), (3, 64, 64), (40, 256, 130)])
def test_fprop_against_float64(shape, policy):
    (codes, scale), q = operands(shape, policy)
    got = gemm_fprop(codes, scale, q.codes, q.scale, out_dtype=torch.float32)
    want = dequant_act(codes, scale, torch.float64) @ dequant_weight(q.codes, q.scale, torch.float64).t()
    assert float((got - want).norm() / want.norm()) < 2e-7
    assert torch.equal(gemm_fprop(codes, scale, q.codes, q.scale), got.bfloat16())


def test_one_block_is_exact():
    (codes, scale), q = operands((9, 128, 128))
    got = gemm_fprop(codes, scale, q.codes, q.scale, out_dtype=torch.float32)
    integers = (codes.double() * 512).long() @ (q.codes.double() * 512).long().t()  # exact in int64
    assert torch.equal(got, (integers.double() / 2**18).float() * (scale * q.scale))


def test_blocks_are_summed_in_order_in_fp32():
    (codes, scale), q = operands((4, 128, 1280))
    want = torch.zeros(4, 128)
    for k in range(10):
        span = slice(128 * k, 128 * k + 128)
        want = want + gemm_fprop(
            codes[:, span], scale[:, k : k + 1], q.codes[:, span], q.scale[:, k : k + 1], out_dtype=torch.float32
        )
    assert torch.equal(gemm_fprop(codes, scale, q.codes, q.scale, out_dtype=torch.float32), want)


@pytest.mark.parametrize("threads", [1, 2])
def test_row_alone_equals_row_in_batch(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (codes, scale), q = operands((257, 384, 640))
        whole = gemm_fprop(codes, scale, q.codes, q.scale, out_dtype=torch.float32)
        for rows in (slice(0, 1), slice(100, 101), slice(3, 36), slice(256, 257)):
            part = gemm_fprop(codes[rows], scale[rows], q.codes, q.scale, out_dtype=torch.float32)
            assert torch.equal(part, whole[rows])
    finally:
        torch.set_num_threads(before)


def test_dgrad_uses_the_forward_bytes():
    (dy_codes, dy_scale), _ = operands((20, 1, 320))
    q = quant_weight(torch.randn(320, 200), transposed=True)
    got = gemm_dgrad(dy_codes, dy_scale, q.codes, q.scale, out_dtype=torch.float32)
    want = dequant_act(dy_codes, dy_scale, torch.float64) @ dequant_weight(q.codes, q.scale, torch.float64)
    assert float((got - want).norm() / want.norm()) < 2e-7
    with_copy = gemm_dgrad(dy_codes, dy_scale, q.codes, q.scale, w_codes_t=q.codes_t, out_dtype=torch.float32)
    assert torch.equal(got, with_copy)


@pytest.mark.parametrize("tokens", [1, 128, 300])
def test_wgrad_accumulates(tokens):
    dy = quant_act_cols(torch.randn(tokens, 130).bfloat16())
    x = quant_act_cols(torch.randn(tokens, 70).bfloat16())
    want = dequant_act_cols(*dy, torch.float64).t() @ dequant_act_cols(*x, torch.float64)
    out = torch.full((130, 70), 3.0)
    gemm_wgrad(dy, x, out=out, accumulate=False)
    assert float((out - want).norm() / want.norm()) < 2e-7
    once = out.clone()
    gemm_wgrad(dy, x, out=out)
    assert torch.equal(out, once + once)


def test_nonfinite_input_poisons_its_row():
    x = torch.randn(3, 256).bfloat16()
    x[1, 7] = float("nan")
    q = quant_weight(torch.randn(128, 256))
    y = gemm_fprop(*quant_act(x), q.codes, q.scale)
    assert torch.isnan(y).all(1).tolist() == [False, True, False]
    assert bool(torch.isfinite(y[[0, 2]]).all())


def test_errors_name_what_is_wrong():
    (codes, scale), q = operands((4, 128, 256))
    with pytest.raises(ValueError, match="in features of x and w differ: 128 and 256"):
        gemm_fprop(codes[:, :128], scale[:, :1], q.codes, q.scale)
    with pytest.raises(ValueError, match=r"x codes \(4, 256\) need a scale of shape \(4, 2\)"):
        gemm_fprop(codes, scale[:, :1], q.codes, q.scale)
    with pytest.raises(ValueError, match=r"float8_e4m3fn, not torch\.float32"):
        gemm_fprop(codes.float(), scale, q.codes, q.scale)
    cols = quant_act_cols(torch.randn(4, 128).bfloat16())
    with pytest.raises(ValueError, match="wgrad of 128 x 128 goes into FP32"):
        gemm_wgrad(cols, cols, out=torch.zeros(128, 64))
