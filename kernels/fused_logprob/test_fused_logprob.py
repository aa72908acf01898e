"""Chunked log-probs against the two-step version, split vocabularies included."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from jetrl_kernels.fused_logprob import fused_logprob


def case(tokens: int = 37, hidden: int = 32, vocab: int = 101, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    h = (torch.randn(tokens, hidden) * 2).to(dtype).requires_grad_()
    w = torch.nn.Parameter(torch.randn(vocab, hidden).to(dtype))
    return h, w, torch.randint(0, vocab, (tokens,))


def two_step(h, w, y, temperature=1.0):
    logp = torch.log_softmax(torch.nn.functional.linear(h, w).float() / temperature, -1)
    return logp.gather(-1, y[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk_logits", [1, 500, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients_against_float64(chunk_logits, temperature):
    h, w, y = case()
    logp, entropy = fused_logprob(
        h, w, y, temperature=temperature, logits_dtype=torch.float32, chunk_logits=chunk_logits
    )
    a, b = torch.randn_like(logp), torch.randn_like(entropy)
    (logp * a + entropy * b).sum().backward()
    h64, w64 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    log_p = torch.log_softmax(h64 @ w64.t() / temperature, -1)
    want_logp = log_p.gather(-1, y[:, None]).squeeze(-1)
    want_entropy = -(log_p.exp() * log_p).sum(-1)
    (want_logp * a + want_entropy * b).sum().backward()
    torch.testing.assert_close(logp.double(), want_logp, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=5e-5, rtol=1e-4)
    assert h.grad is not None and w.grad is not None and h64.grad is not None and w64.grad is not None
    torch.testing.assert_close(h.grad.double(), h64.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(w.grad.double(), w64.grad, atol=1e-4, rtol=1e-4)


def test_temperature_as_an_engine_reports_it():
    h = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    logp, _ = fused_logprob(h, torch.eye(3), torch.arange(3), temperature=0.5)
    torch.testing.assert_close(logp, torch.tensor([-0.1429, -2.1429, -4.1429]), atol=5e-5, rtol=0)


def test_bf16_logits_are_rounded_as_the_engine_rounds_them():
    h, w, y = case(dtype=torch.bfloat16)
    want, want_entropy = two_step(h, w, y)
    logp, entropy = fused_logprob(h, w, y)
    torch.testing.assert_close(logp, want, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-4, rtol=1e-4)


def test_padding_rows_never_count():
    h, w, y = case()
    padded = torch.cat([w.detach(), torch.full((27, 32), 50.0)]).requires_grad_()
    want = fused_logprob(h, w, y)
    got = fused_logprob(h, padded, y, vocab_size=101)
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])
    got[0].sum().backward()
    assert padded.grad is not None and not bool(padded.grad[101:].any())


def test_gradients_do_not_depend_on_whose_log_softmax_is_reported():
    found = []
    for whole in (True, False):
        h, w, y = case(dtype=torch.bfloat16)
        logp, entropy = fused_logprob(h, w, y, temperature=0.7, logits_dtype=torch.float32, whole=whole)
        (logp + 0.1 * entropy).sum().backward()
        assert h.grad is not None and w.grad is not None
        found.append((logp.detach(), h.grad, w.grad))
    torch.testing.assert_close(found[0][0], found[1][0], atol=4e-6, rtol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_of_the_vocabulary_change_gradients_by_rounding_alone(dtype):
    found = []
    for chunk_logits in (500, 1 << 20):
        h, w, y = case(dtype=dtype)
        logp, entropy = fused_logprob(h, w, y, logits_dtype=torch.float32, chunk_logits=chunk_logits)
        (logp + 0.1 * entropy).sum().backward()
        found.append((h.grad, w.grad))
    # Sums over the vocabulary in another order; each row of the head's gradient is one sum either way.
    tolerance = {"atol": 0.07, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(found[0][0], found[1][0], **tolerance)
    torch.testing.assert_close(found[0][1], found[1][1], **tolerance)


def test_no_tokens_give_no_gradient():
    h, w, y = case(tokens=0)
    logp, entropy = fused_logprob(h, w, y)
    (logp.sum() + entropy.sum()).backward()
    assert h.grad is not None and h.grad.shape == (0, 32)
    assert w.grad is not None and not w.grad.any()


def test_main_grad_of_the_head():
    h, w, y = case()
    fused_logprob(h, w, y)[0].sum().backward()
    assert w.grad is not None
    want, w.grad = w.grad.clone(), None
    w.main_grad = torch.ones(101, 32)  # type: ignore[attr-defined]
    fused_logprob(h, w, y)[0].sum().backward()
    torch.testing.assert_close(w.main_grad, want + 1)  # type: ignore[attr-defined]
    assert w.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_no_tensor_of_tokens_times_vocabulary():
    h, w, y = case(tokens=64, vocab=512)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.numel())
            return out

    with Watch():
        logp, entropy = fused_logprob(h, w, y, chunk_logits=512 * 8)
        (logp + entropy).sum().backward()
    assert largest == 512 * 32  # the gradient of lm_head; logits are a quarter of that


def _split(rank: int, rendezvous: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    h, w, y = case()
    whole = fused_logprob(h, w, y, logits_dtype=torch.float32)
    (whole[0] + 0.1 * whole[1]).sum().backward()
    assert h.grad is not None and w.grad is not None
    want_h, want_w = h.grad.clone(), w.grad.clone()
    h.grad = None
    padded = torch.cat([w.detach(), torch.ones(27, 32)])
    local = padded[rank * 64 : rank * 64 + 64].clone().requires_grad_()
    got = fused_logprob(
        h, local, y, vocab_start=rank * 64, vocab_size=101, group=dist.group.WORLD, logits_dtype=torch.float32
    )
    torch.testing.assert_close(got[0], whole[0], atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(got[1], whole[1], atol=2e-5, rtol=1e-5)
    (got[0] + 0.1 * got[1]).sum().backward()
    assert h.grad is not None and local.grad is not None
    dist.all_reduce(h.grad)
    torch.testing.assert_close(h.grad, want_h, atol=1e-5, rtol=1e-4)
    valid = 64 if rank == 0 else 37
    torch.testing.assert_close(local.grad[:valid], want_w[rank * 64 : rank * 64 + valid], atol=1e-5, rtol=1e-4)
    dist.destroy_process_group()


def test_vocabulary_split_over_two_ranks(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path / "rendezvous")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()


def test_errors_name_what_is_wrong():
    h, w, y = case()
    with pytest.raises(ValueError, match="temperature must be positive, not 0"):
        fused_logprob(h, w, y, temperature=0)
    with pytest.raises(ValueError, match="do not fit"):
        fused_logprob(h, w[:, :5], y)
    with pytest.raises(ValueError, match="one id for each of 37 tokens"):
        fused_logprob(h, w, y[:3])
    with pytest.raises(ValueError, match="first local row is 200"):
        fused_logprob(h, w, y, vocab_start=200, vocab_size=101)


if __name__ == "__main__":
    _split(int(sys.argv[1]), sys.argv[2])
