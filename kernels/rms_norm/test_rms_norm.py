"""RMSNorm: vLLM's roundings, batch invariance, gradients."""

import pytest
import torch

from jetrl_kernels.rms_norm import add_rms_norm, rms_norm


def test_value_is_rounded_before_the_weight():
    x, w = torch.randn(50, 96).bfloat16(), torch.randn(96).bfloat16()
    f = x.float()
    want = (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16() * w
    got = rms_norm(x, w, 1e-5)
    assert float((got.float() - want.float()).abs().max()) <= 2**-6 and float((got == want).float().mean()) > 0.995


@pytest.mark.parametrize("hidden", [64, 256, 4096])
def test_row_alone_equals_row_in_batch(hidden):
    x, w = torch.randn(333, hidden).bfloat16(), torch.randn(hidden).bfloat16()
    whole = rms_norm(x, w)
    for rows in (slice(0, 1), slice(9, 41), slice(332, 333)):
        assert torch.equal(rms_norm(x[rows], w), whole[rows])


def test_residual_is_rounded_first():
    x, r, w = torch.randn(20, 64).bfloat16(), torch.randn(20, 64).bfloat16(), torch.ones(64)
    y, total = add_rms_norm(x, r, w)
    assert torch.equal(total, x + r) and torch.equal(y, rms_norm(x + r, w))


def test_gradients_against_float64():
    x = torch.randn(6, 5, 64).bfloat16().requires_grad_()
    r = torch.randn(6, 5, 64).bfloat16().requires_grad_()
    w = torch.nn.Parameter(torch.randn(64))
    y, total = add_rms_norm(x, r, w)
    dy, ds = torch.randn_like(y), torch.randn_like(y)
    torch.autograd.backward([y, total], [dy, ds])
    s64, w64 = total.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    y64 = s64 * torch.rsqrt(s64.pow(2).mean(-1, keepdim=True) + 1e-6) * w64
    torch.autograd.backward([y64, s64 * 1.0], [dy.double(), ds.double()])
    assert x.grad is not None and w.grad is not None and s64.grad is not None and w64.grad is not None
    assert torch.equal(x.grad, r.grad)
    assert float((x.grad.double() - s64.grad).norm() / s64.grad.norm()) < 5e-3
    assert float((w.grad.double() - w64.grad).norm() / w64.grad.norm()) < 1e-5


def test_errors_name_what_is_wrong():
    with pytest.raises(TypeError, match="float32"):
        rms_norm(torch.zeros(2, 4), torch.ones(4))
    with pytest.raises(ValueError, match=r"weight \(5,\) does not fit x \(2, 4\)"):
        rms_norm(torch.zeros(2, 4).bfloat16(), torch.ones(5))
