"""Exact parity on one GPU, piece by piece: no shared operation's result depends on the batch around a token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

ROWS = [1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 100, 128, 200, 256, 257, 384, 512, 1000, 1024, 1664]


def _heavy(*shape: int, seed: int) -> torch.Tensor:
    """Student's t with 3 degrees of freedom, BF16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    t, *squares = (torch.randn(shape, generator=generator, device="cuda") for _ in range(4))
    return (t / torch.stack(squares).square_().mean(0).sqrt_()).bfloat16()


@pytest.mark.parametrize("hidden, vocab", [(256, 256), (1024, 151936), (2048, 151936), (4096, 151936), (4096, 128256)])
def test_logits_of_a_row_do_not_depend_on_the_rows_around_it(hidden: int, vocab: int) -> None:
    from jetrl_kernels.fused_logprob.chunk import head_logits

    x, head = _heavy(2048, hidden, seed=0), _heavy(vocab, hidden, seed=1)
    whole = head_logits(x, head)
    wrong = [n for n in ROWS if not torch.equal(head_logits(x[:n], head), whole[:n])]
    wrong += [-n for n in ROWS if not torch.equal(head_logits(x[-n:], head), whole[-n:])]
    assert wrong == []


@pytest.mark.parametrize("vocab", [256, 128256, 151936, 152064])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_log_probs_are_those_of_vllms_sampler(vocab: int, temperature: float) -> None:
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    from jetrl_kernels.fused_logprob import kernel

    rows = 257
    z = (_heavy(rows, vocab, seed=2).float() * 3).clamp_(-80, 80)
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(0)).cuda()
    ours = kernel.token_logprob(z.clone(), targets, temperature)
    apply_temperature(z, torch.zeros(rows, dtype=torch.int32, device="cuda"), torch.tensor([temperature]).cuda())
    assert torch.equal(ours, compute_token_logprobs(z, targets[:, None]).squeeze(1))
    want = z.double().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(ours.double(), want, atol=4e-6, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engines_log_softmax_keeps_memory_and_gradients(temperature: float) -> None:
    from jetrl_kernels.fused_logprob import fused_logprob

    tokens, hidden, vocab = 4096, 512, 151936
    head = (_heavy(vocab, hidden, seed=3) * 0.1).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(1)).cuda()
    grads, logps = [], []
    for whole in (True, False):
        x = _heavy(tokens, hidden, seed=4).requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logp, entropy = fused_logprob(
            x, head, targets, temperature=temperature, logits_dtype=torch.float32, chunk_logits=1 << 26, whole=whole
        )
        (logp + 0.1 * entropy).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 3 << 30  # of 2.5 GB for all logits once; chunks of 0.27
        assert x.grad is not None and head.grad is not None
        grads.append((x.grad, head.grad))
        logps.append(logp.detach())
        head.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    torch.testing.assert_close(logps[0], logps[1], atol=4e-6, rtol=1e-6)


@pytest.mark.parametrize("heads, kv_heads", [(16, 8), (32, 8)])
def test_attention_is_the_same_in_decode_chunks_pages_and_packed(heads: int, kv_heads: int) -> None:
    """One sequence of 2,100 tokens: the trainer's packed call, and the engine's paged cache read by one, by chunks."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from jetrl_megatron.megatron.gpu import attention

    length, dim, page, other = 2100, 128, 16, 300
    q, k, v = (_heavy(length + other, n, dim, seed=x) for n, x in ((heads, 5), (kv_heads, 6), (kv_heads, 7)))
    bounds = torch.tensor([0, other, other + length], dtype=torch.int32, device="cuda")
    want = attention(q, k, v, bounds, dim**-0.5)[other:].view(length, heads, dim)
    pages = -(-length // page)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().cuda()
    slots = (table.long()[:, None] * page + torch.arange(page, device="cuda")).flatten()[:length]
    caches = [torch.zeros(pages * page, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for cache, x in zip(caches, (k, v)):
        cache[slots] = x[other:]
    k_cache, v_cache = (c.view(pages, page, kv_heads, dim) for c in caches)

    def engine(starts: list[int], ends: list[int]) -> torch.Tensor:
        """Rows starts[i]:ends[i] as requests of one batch, each seeing the keys up to its end."""
        queries = torch.cat([q[other + a : other + b] for a, b in zip(starts, ends)])
        counts = torch.tensor([b - a for a, b in zip(starts, ends)])
        return flash_attn_varlen_func(
            q=queries, k=k_cache, v=v_cache, max_seqlen_q=int(counts.max()), max_seqlen_k=max(ends),
            cu_seqlens_q=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().cuda(),
            seqused_k=torch.tensor(ends, dtype=torch.int32, device="cuda"), causal=True, softmax_scale=dim**-0.5,
            block_table=table.expand(len(starts), -1).contiguous(), fa_version=3, num_splits=1,
        )  # fmt: skip

    assert torch.equal(engine([0], [length]), want)
    ends = [1, 127, 128, 129, 500, 512, 513, 1000, 1999, 2048, 2100]
    decoded = engine([e - 1 for e in ends], ends)
    assert torch.equal(decoded, want[[e - 1 for e in ends]])
    assert torch.equal(engine([ends[-2] - 1], [ends[-2]]), want[ends[-2] - 1 : ends[-2]])
    chunks = list(zip([0, 700, 701, 1500], [700, 701, 1500, length]))
    for a, b in chunks:
        assert torch.equal(engine([a, 99], [b, 100])[: b - a], want[a:b]), (a, b)


CASES = {
    # name: what differs from a plain comparison
    "temperature": {"temperature": 0.7, "again": True, "prompt": 40, "new": 200},
    "preemption": {"sequences": 48, "prompt": 16, "new": 600, "memory_gib": 0.03, "layers": True},
    "chunks": {"sequences": 6, "prompt": 900, "new": 300, "again": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_engine_under_strain_has_the_trainers_log_probs(case: str, tmp_path: Path) -> None:
    """Compiled and captured, with prefixes from the cache, prompts in chunks, requests set back for want of pages."""
    from jetrl_megatron.tiny import make_tiny_model

    model = make_tiny_model(tmp_path / "model", 7, heads=4, kv_heads=2, hidden=512, ffn=1024)
    settings = {
        "model": str(model), "mode": "jetrl", "layers": False, "sequences": 16, "device": "cuda",
        "folder": str(tmp_path), "heavy": True,
    } | CASES[case]  # fmt: skip
    command = [sys.executable, "-m", "jetrl_megatron.commands.verify_parity", json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=380)
    assert done.returncode == 0
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tokens"] == settings["sequences"] * settings["new"]
    assert result["decode"]["mismatch_count"] == 0
    assert result["prefill"]["mismatch_count"] == 0
    if settings.get("again"):
        assert result["again"]["mismatch_count"] == result["again"]["tokens_changed"] == 0
        assert result["again"]["cached_tokens"] > 0
    if settings["layers"]:
        assert result["first_difference"] is None


@pytest.mark.slow
def test_one_bit_stops_a_run_whose_engine_sleeps_and_its_operation_is_named(tmp_path: Path) -> None:
    """The engine is woken with the trainer's weights and runs uncompiled, to be compared operation by operation."""
    from jetrl_megatron.tiny import make_tiny_model

    model, result = make_tiny_model(tmp_path / "model", 7), tmp_path / "result.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    script = Path(__file__).with_name("exact_fault.py")
    subprocess.run([*launcher, str(script), str(model), str(result)], check=True, timeout=380)
    seen = json.loads(result.read_text())
    assert seen["mismatched"] == 0
    assert "the first operation that differs is layer 1, self_attn.attention. Nothing was trained" in seen["said"]
