"""Grouped GEMM reference: each expert its own rows, empty experts, rows nobody owns."""

import pytest
import torch

from jetrl_kernels.gemm_fp8 import gemm_fprop
from jetrl_kernels.grouped_gemm import grouped_gemm
from jetrl_kernels.quant_act import quant_act
from jetrl_kernels.quant_weight import quant_weight


def case(experts: int = 4, out: int = 192, inp: int = 256):
    torch.manual_seed(0)
    x = quant_act(torch.randn(40, inp).bfloat16())
    weights = [quant_weight(torch.randn(out, inp)) for _ in range(experts)]
    return x, weights, torch.stack([w.codes for w in weights]), torch.stack([w.scale for w in weights])


def test_each_expert_its_own_rows():
    (codes, scale), weights, w_codes, w_scale = case()
    offsets = torch.tensor([0, 7, 7, 30, 38])
    got = grouped_gemm(codes, scale, w_codes, w_scale, offsets)
    for e, (a, b) in enumerate([(0, 7), (7, 7), (7, 30), (30, 38)]):
        assert torch.equal(got[a:b], gemm_fprop(codes[a:b], scale[a:b], weights[e].codes, weights[e].scale))
    assert not bool(got[38:].any())


def test_every_mistake_is_listed():
    (codes, scale), _, w_codes, w_scale = case()
    with pytest.raises(ValueError, match=r"x scale is .*; w scale is .*; offsets are \(4,\), not \(5,\)"):
        grouped_gemm(codes, scale[:, :1], w_codes, w_scale[:, :1], torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="in features of x and w differ: 128 and 256"):
        grouped_gemm(codes[:, :128], scale[:, :1], w_codes, w_scale, torch.zeros(5, dtype=torch.int64))
