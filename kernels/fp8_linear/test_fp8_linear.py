"""FP8 linear: values, gradients, main_grad, batch invariance."""

import pytest
import torch

from jetrl_kernels.fp8_linear import fp8_linear
from jetrl_kernels.gemm_fp8 import gemm_fprop
from jetrl_kernels.quant_act import dequant_act, dequant_act_cols, quant_act, quant_act_cols
from jetrl_kernels.quant_weight import dequant_weight, quant_weight


def case(tokens: int = 40, out: int = 192, inp: int = 320, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(tokens + out)
    weight = torch.nn.Parameter((torch.randn(out, inp) / inp**0.5).to(dtype))
    x = torch.randn(tokens, inp).bfloat16().requires_grad_()
    return x, weight, quant_weight(weight.detach())


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def test_forward_is_quantize_then_gemm():
    x, weight, q = case()
    bias = torch.randn(192).bfloat16()
    want = gemm_fprop(*quant_act(x), q.codes, q.scale)
    assert torch.equal(fp8_linear(x, weight, q), want)
    assert torch.equal(fp8_linear(x, weight, q, bias), want + bias)
    assert torch.equal(fp8_linear(x.view(4, 10, 320), None, q).view(40, 192), want)
    full = fp8_linear(x, weight, q, out_dtype=torch.float32)
    assert full.dtype == torch.float32 and torch.equal(full.bfloat16(), want)
    assert not torch.equal(full, want.float())


def test_training_and_inference_give_the_same_bits_at_any_batch():
    x, weight, q = case(300)
    train = fp8_linear(x, weight, q)
    with torch.no_grad():
        for rows in (slice(0, 1), slice(7, 40), slice(0, 300)):
            assert torch.equal(fp8_linear(x[rows], None, q), train[rows])


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_against_float64_of_the_dequantized_graph(wgrad, dtype):
    x, weight, q = case(150, dtype=dtype)
    y = fp8_linear(x, weight, q, wgrad=wgrad)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None and weight.grad.dtype == dtype
    dx = dequant_act(*quant_act(dy), torch.float64) @ dequant_weight(q.codes, q.scale, torch.float64)
    assert torch.equal(x.grad, dx.float().bfloat16()) or cosine(x.grad, dx) > 1 - 1e-5
    if wgrad == "fp8":
        dw = dequant_act_cols(*quant_act_cols(dy), torch.float64).t() @ dequant_act_cols(
            *quant_act_cols(x), torch.float64
        )
    else:
        dw = dy.double().t() @ x.detach().double()
    assert float((weight.grad.double() - dw).norm() / dw.norm()) < (2e-7 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_main_grad_accumulates_in_fp32(wgrad):
    x, weight, q = case()
    fp8_linear(x, weight, q, wgrad=wgrad, out_dtype=torch.float32).sum().backward()
    weight32 = torch.nn.Parameter(weight.detach().float())
    fp8_linear(x, weight32, q, wgrad=wgrad).sum().backward()
    assert weight32.grad is not None
    weight.grad, hooks = None, []
    weight.main_grad = torch.full((192, 320), 1.0)  # type: ignore[attr-defined]
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    weight.register_post_accumulate_grad_hook(lambda p: hooks.append(p.grad_added_to_main_grad))
    for _ in range(2):
        fp8_linear(x, weight, q, wgrad=wgrad).sum().backward()
    assert hooks == [True, True]
    assert torch.equal(weight.main_grad, 1.0 + weight32.grad + weight32.grad)  # type: ignore[attr-defined]
    assert weight.grad is not None and not bool(weight.grad.any())


def test_frozen_weight_and_frozen_input():
    x, weight, q = case()
    fp8_linear(x, weight.requires_grad_(False), q).sum().backward()
    assert x.grad is not None and weight.grad is None
    x, weight, q = case()
    fp8_linear(x.detach(), weight, q).sum().backward()
    assert weight.grad is not None
    assert not fp8_linear(x.detach(), None, q).requires_grad


def test_saved_activations_are_fp8():
    x, weight, q = case(256, 128, 512)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8_linear(x, weight, q)
    assert sum(t.numel() * t.element_size() for t in saved) == 256 * 512 + 2 * 512 * 4


def test_wgrad_cosine_with_advantages_over_four_decades():
    # The 128-token groups share a scale, so small dY beside large ones are flushed: measured, and small in the sum.
    torch.manual_seed(0)
    x, weight, q = case(1024, 256, 256)
    advantage = 10.0 ** (-4 * torch.rand(1024, 1))
    dy = (torch.randn(1024, 256) * advantage).bfloat16()
    grads = []
    for wgrad in ("fp8", "bf16"):
        weight.grad = None
        fp8_linear(x, weight, q, wgrad=wgrad).backward(dy)
        assert weight.grad is not None
        grads.append(weight.grad.clone())
    assert cosine(*grads) > 0.998


def test_errors_name_what_is_wrong():
    x, weight, q = case()
    with pytest.raises(ValueError, match="wgrad 'int8' is not one of fp8, bf16"):
        fp8_linear(x, weight, q, wgrad="int8")
    with pytest.raises(ValueError, match="policy 'e8m0'"):
        fp8_linear(x, weight, q, policy="e8m0")
    with pytest.raises(TypeError, match="float32"):
        fp8_linear(x.float(), weight, q)
    with pytest.raises(ValueError, match=r"does not fit a weight of 192 x 320"):
        fp8_linear(x[:, :128], weight, q)
    with pytest.raises(ValueError, match="differ in shape"):
        fp8_linear(x, weight[:128], q)
