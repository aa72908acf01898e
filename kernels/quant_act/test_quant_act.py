"""Activation quantizer: groups, layouts, odd shapes, edge values."""

import math

import pytest
import torch

from jetrl_kernels.formats import MIN_SCALE
from jetrl_kernels.quant_act import dequant_act, dequant_act_cols, quant_act, quant_act_both, quant_act_cols
from jetrl_kernels.quant_weight import quant_weight


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("policy", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(1, 128), (7, 320), (33, 64), (130, 257), (0, 128)])
def test_rows_are_quantized_alone(shape, policy):
    x = torch.randn(shape).bfloat16()
    codes, scale = quant_act(x, policy)
    assert codes.shape == shape and scale.shape == (shape[0], -(-shape[1] // 128))
    for row in range(shape[0]):
        alone_codes, alone_scale = quant_act(x[row : row + 1], policy)
        assert same(alone_codes, codes[row : row + 1]) and torch.equal(alone_scale, scale[row : row + 1])


def test_a_row_group_is_a_weight_tile_of_one_row():
    x = torch.randn(1, 384).bfloat16()
    codes, scale = quant_act(x)
    q = quant_weight(x)
    assert same(codes, q.codes) and torch.equal(scale, q.scale)


def test_scale_memory_is_what_the_gemm_reads():
    _, scale = quant_act(torch.randn(30, 512).bfloat16())
    assert scale.stride() == (1, 32)


@pytest.mark.parametrize("shape", [(128, 5), (300, 130), (64, 64)])
def test_columns_are_rows_of_the_transposed(shape):
    x = torch.randn(shape).bfloat16()
    codes, scale = quant_act_cols(x)
    want_codes, want_scale = quant_act(x.t().contiguous())
    assert codes.shape == shape[::-1] and scale.shape == (-(-shape[0] // 128), shape[1])
    assert same(codes, want_codes) and torch.equal(scale, want_scale.t())
    rows, cols = quant_act_both(x)
    assert same(rows[0], quant_act(x)[0]) and same(cols[0], codes) and torch.equal(cols[1], scale)
    assert torch.equal(dequant_act_cols(codes, scale), dequant_act(want_codes, want_scale).t())


@pytest.mark.parametrize("policy", ["pow2", "fp32"])
def test_edge_values(policy):
    x = torch.zeros(5, 128)
    x[1] = 1e-40
    x[2], x[2, 5] = 1.0, -0.0
    x[3, 0], x[4, 0] = math.nan, -math.inf
    codes, scale = quant_act(x.bfloat16(), policy)
    raw = codes.view(torch.uint8)
    assert not bool(raw[0].any()) and float(scale[0]) == MIN_SCALE == float(scale[1])
    assert int(raw[2, 5]) == 0x80
    assert torch.isnan(scale[:, 0]).tolist() == [False, False, False, True, True]
    assert not bool(raw[3:].any())


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        quant_act(torch.zeros(2, 3, 4).bfloat16())
    with pytest.raises(TypeError, match="float64"):
        quant_act(torch.zeros(2, 128).double())
