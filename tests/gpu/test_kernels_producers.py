"""Norm, SwiGLU, digest and log-prob kernels against the references.

On a Hopper GPU these run the kernels; with TRITON_INTERPRET=1 the same on a CPU in Triton's interpreter.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOptionalSubscript=false, reportOptionalIterable=false
from __future__ import annotations

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


def mostly_equal(a: torch.Tensor, b: torch.Tensor, share: float) -> None:
    """Equal but for at most `share` of the elements, and those within two BF16 steps (2**-6 of the larger)."""
    a, b = a.cpu().float(), b.cpu().float()
    assert float((a != b).float().mean()) <= share
    assert bool(((a - b).abs() <= 2**-6 * torch.maximum(a.abs(), b.abs()) + 1e-30).all())


SHAPES = [(2, 64), (34, 384)] if INTERPRETED else [(1, 64), (131, 4096), (1000, 5120), (33, 2880), (300, 12288)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm_forward_and_backward(shape, with_residual):
    from jetrl_kernels.quant_act import reference as quantizer
    from jetrl_kernels.rms_norm import kernel, reference

    torch.manual_seed(1)
    x, w = torch.randn(shape).bfloat16(), torch.randn(shape[1]).bfloat16()
    residual = torch.randn(shape).bfloat16() if with_residual else None
    on_device = None if residual is None else residual.to(DEVICE)
    total_want = x if residual is None else x + residual
    want, rstd_want = reference.rms_norm(total_want, w, 1e-6)
    outs = []
    for flags in ({"bf16": True}, {"bf16": True, "row": True}, {"bf16": True, "row": True, "col": True}):
        out, total, rstd = kernel.forward(x.to(DEVICE), w.to(DEVICE), 1e-6, residual=on_device, **flags)
        assert same(total, total_want)
        assert out.bf16 is not None
        mostly_equal(out.bf16, want, 1e-3)
        torch.testing.assert_close(rstd.cpu(), rstd_want[:, 0], rtol=1e-6, atol=0)
        outs.append(out)
    assert same(outs[0].bf16, outs[1].bf16) and same(outs[0].bf16, outs[2].bf16)
    # The fused FP8 is the FP8 of the unfused BF16 result.
    y = outs[0].bf16.cpu()
    for got, expected in zip((*outs[1].row, *outs[2].row), quantizer.quant_act(y, "pow2") * 2):
        assert same(got, expected)
    for got, expected in zip(outs[2].col, quantizer.quant_act_cols(y, "pow2")):
        assert same(got, expected)
    for rows in (slice(0, 1), slice(shape[0] // 2, shape[0])):
        part, *_ = kernel.forward(
            x[rows].to(DEVICE), w.to(DEVICE), 1e-6, residual=None if residual is None else on_device[rows]
        )
        assert same(part.bf16, y[rows])
    dy, d_total = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    rstd = rstd_want[:, 0].contiguous()
    dx, dw = kernel.backward(dy.to(DEVICE), total_want.to(DEVICE), w.to(DEVICE), rstd.to(DEVICE))
    want_dx, want_dw = reference.rms_norm_backward(dy, total_want, w, rstd_want)
    assert float((dx.cpu().float() - want_dx.float()).norm() / want_dx.float().norm()) < 2e-3
    torch.testing.assert_close(dw.cpu(), want_dw, rtol=1e-4, atol=1e-4)
    with_total, _ = kernel.backward(
        dy.to(DEVICE), total_want.to(DEVICE), w.to(DEVICE), rstd.to(DEVICE), d_total.to(DEVICE)
    )
    assert same(with_total, dx.cpu() + d_total)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("hidden", [1024, 2880, 4096, 5120])
@pytest.mark.parametrize("with_residual", [False, True])
def test_cuda_and_triton_norms_agree(hidden, with_residual, monkeypatch):
    """The CUDA C++ kernels and the Triton ones that stand in for them: the same bits forward, and close gradients."""
    from jetrl_kernels import cuda_lib
    from jetrl_kernels.rms_norm import kernel

    torch.manual_seed(5)
    x, residual, dy = (torch.randn(777, hidden, device="cuda").bfloat16() for _ in range(3))
    weight = torch.randn(hidden, device="cuda").bfloat16()
    assert cuda_lib.takes(hidden, x)
    results = []
    for use in (True, False):
        if not use:
            monkeypatch.setattr(cuda_lib, "takes", lambda *args: False)
        added = residual if with_residual else None
        for col in (False, True):
            out, total, rstd = kernel.forward(x, weight, 1e-6, residual=added, bf16=True, row=True, col=col)
            results.append([out.bf16, *out.row, total, rstd, *(out.col or ())])
        results.append(kernel.backward(dy, x, weight, rstd, added))
    for cuda, triton in zip(results[:2], results[3:5]):
        assert all(same(a, b) for a, b in zip(cuda, triton, strict=True))
    for cuda, triton in zip(results[2], results[5]):
        assert float((cuda.float() - triton.float()).norm() / triton.float().norm()) < 2e-3


@pytest.mark.parametrize("shape", [(3, 128), (130, 256)] if INTERPRETED else [(3, 128), (130, 3072), (999, 12288)])
def test_swiglu_forward_and_backward(shape):
    from jetrl_kernels.quant_act import reference as quantizer
    from jetrl_kernels.swiglu import kernel, reference

    torch.manual_seed(2)
    rows, half = shape
    x, dy = (torch.randn(rows, 2 * half) * 3).bfloat16(), torch.randn(rows, half).bfloat16()
    cases = (
        (kernel.forward, (x,), reference.silu_mul(x)),
        (kernel.backward, (dy, x), reference.silu_mul_backward(dy, x)),
    )
    for run, args, want in cases:
        args = tuple(a.to(DEVICE) for a in args)
        plain = run(*args, "pow2", bf16=True, row=False, col=False)
        both = run(*args, "pow2", bf16=True, row=True, col=True)
        row = run(*args, "pow2", bf16=False, row=True, col=False)
        mostly_equal(plain.bf16, want, 2e-2)  # exp of two libraries; a step of BF16 at most
        assert same(plain.bf16, both.bf16)
        y = plain.bf16.cpu()
        for got, expected in zip((*both.row, *row.row), quantizer.quant_act(y, "pow2") * 2):
            assert same(got, expected)
        for got, expected in zip(both.col, quantizer.quant_act_cols(y, "pow2")):
            assert same(got, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_digest_has_the_cpu_value(dtype):
    from jetrl_kernels.digest import kernel, reference

    torch.manual_seed(3)
    shapes = [(1, 1), (3, 5), (20, 520)] if INTERPRETED else [(1, 1), (3, 5), (999, 1030), (700, 12288)]
    for rows, cols in shapes:
        t = torch.randint(0, 250, (rows, cols)).to(dtype)
        for row0, col0 in ((0, 0), (17, 3), (2**33, 128)):
            want = int(reference.digest_tensor(t, row0, col0))
            assert int(kernel.digest_tensor(t.to(DEVICE), row0, col0)) == want


def shards(t: torch.Tensor, cut: int) -> list[torch.Tensor]:
    """Any alignment: of the first element, of the stride from row to row."""
    return [t[cut:, cut:], t[:, :-cut], t[:, : t.shape[1] - cut].contiguous()[1:]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_digest_of_any_alignment(dtype):
    from jetrl_kernels.digest import kernel, reference

    t = torch.randint(0, 250, (5, 67) if INTERPRETED else (300, 1030)).to(dtype)
    for cut in range(1, 4):
        for part, there in zip(shards(t, cut), shards(t.to(DEVICE), cut)):
            assert int(kernel.digest_tensor(there, 1, cut)) == int(reference.digest_tensor(part, 1, cut))


def test_many_digests_are_those_of_the_cpu():
    from jetrl_kernels.digest import Digests, Shard, digest

    torch.manual_seed(4)
    sizes = [(1, 1), (3, 5), (20, 50)] if INTERPRETED else [(1, 4096), (3, 5), (999, 1030), (512, 4096), (32, 32)]
    wanted, held = [], []
    for number, (rows, cols) in enumerate(sizes):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32):
            t = torch.randint(0, 250, (rows, cols)).to(dtype)
            there, r, c = t.to(DEVICE), rows // 2, cols // 3
            for part, row0, col0 in ((there[:r], 0, 0), (there[r:, :c], r, 0), (there[r:, c:], r, c)):
                held.append(Shard(3 * number + len(wanted) % 3, part, row0, col0, cols))
            wanted.append(digest(t))
    digests = Digests(held, len(wanted))
    assert digests() == wanted == digests()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [101, 9000])
def test_logprob_chunk(dtype, vocab):
    from jetrl_kernels.fused_logprob import chunk, kernel

    torch.manual_seed(4)
    tokens = 5 if INTERPRETED else 300
    z = (torch.randn(tokens, vocab) * 4).to(dtype)
    z[0, :5] = -300.0
    targets = torch.randint(0, vocab + 50, (tokens,))
    spec = chunk.Spec(20, vocab, vocab, 20 + vocab, 0.7, None, dtype, 1 << 20, whole=False)
    f = z.float() * spec.inverse_temperature
    local, here = chunk.local_targets(targets, 20, vocab)
    peak = f.amax(-1)
    weight = torch.exp(f - peak[:, None])
    want = torch.stack(
        [peak, weight.sum(-1), (weight * f).sum(-1), torch.where(here, f.gather(-1, local[:, None])[:, 0], 0.0)]
    )
    torch.testing.assert_close(chunk.statistics(z, targets, spec), want, rtol=1e-5, atol=1e-4)
    got = kernel.statistics(z.to(DEVICE), targets.to(DEVICE), 20, spec.inverse_temperature)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)
    lse = want[0] + want[1].log()
    entropy = lse - want[2] / want[1]
    d_logp, d_entropy = torch.randn(tokens), torch.randn(tokens)
    log_p = f - lse[:, None]
    d = -log_p.exp() * (d_logp[:, None] + d_entropy[:, None] * (log_p + entropy[:, None]))
    d.scatter_add_(1, local[:, None], torch.where(here, d_logp, 0.0)[:, None])
    d *= spec.inverse_temperature
    saved, grads = [tuple(t.to(DEVICE) for t in pair) for pair in ((lse, entropy), (d_logp, d_entropy))]
    got = kernel.gradient(z.to(DEVICE), targets.to(DEVICE), saved, grads, 20, spec.inverse_temperature, torch.float32)
    torch.testing.assert_close(got.cpu(), d, rtol=1e-4, atol=1e-5)
