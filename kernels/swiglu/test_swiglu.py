"""SwiGLU: vLLM's roundings, gradient."""

import pytest
import torch

from jetrl_kernels.swiglu import silu_mul


def test_gate_is_rounded_before_the_product():
    x = (torch.randn(40, 96) * 3).bfloat16()
    gate, up = x.chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    got = silu_mul(x)
    assert float((got == want).float().mean()) > 0.999
    assert torch.equal(silu_mul(x[3:4]), got[3:4])
    assert torch.equal(silu_mul(x.view(4, 10, 96)).view(40, 48), got)


def test_extreme_gates_stay_finite():
    x = torch.tensor([[-3e38, -200.0, 0.0, 200.0, 1.0, 1.0, 1.0, 1.0]]).bfloat16()
    assert silu_mul(x).tolist() == [[0.0, 0.0, 0.0, 200.0]]


def test_gradient_against_float64():
    x = torch.randn(30, 64).bfloat16().requires_grad_()
    y = silu_mul(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    x64 = x.detach().double().requires_grad_()
    gate, up = x64.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dy.double())
    assert x.grad is not None and x64.grad is not None
    assert float((x.grad.double() - x64.grad).norm() / x64.grad.norm()) < 3e-3


def test_errors_name_what_is_wrong():
    with pytest.raises(TypeError, match="float32"):
        silu_mul(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="not 5"):
        silu_mul(torch.zeros(2, 5).bfloat16())
