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


class Sequence:
    """One sequence behind another of 300 tokens: the trainer's packed call, and the engine's calls on a paged cache."""

    LENGTH, OTHER, PAGE, DIM = 9000, 300, 16, 128

    def __init__(self, heads: int, kv_heads: int):
        from jetrl_megatron.megatron.gpu import attention

        self.heads, self.scale, other = heads, self.DIM**-0.5, self.OTHER
        q, k, v = (
            _heavy(other + self.LENGTH, n, self.DIM, seed=x) for n, x in ((heads, 5), (kv_heads, 6), (kv_heads, 7))
        )
        self.packed, self.bounds = (q, k, v), _int32([0, other, other + self.LENGTH])
        self.want = attention(q, k, v, self.bounds, self.scale)[other:].view(self.LENGTH, heads, self.DIM)
        self.q, k, v = q[other:], k[other:], v[other:]
        pages = -(-self.LENGTH // self.PAGE)
        self.table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().cuda()
        slots = (self.table.long()[:, None] * self.PAGE + torch.arange(self.PAGE, device="cuda")).flatten()
        # vLLM's layout: keys and values of a head side by side.
        cache = torch.zeros(pages * self.PAGE, kv_heads, 2 * self.DIM, dtype=torch.bfloat16, device="cuda")
        cache[slots[: self.LENGTH]] = torch.cat((k, v), -1)
        self.k_cache, self.v_cache = cache.view(pages, self.PAGE, kv_heads, 2 * self.DIM).split(self.DIM, -1)

    def pages(self, count: int) -> torch.Tensor:
        return torch.nn.functional.pad(self.table, (0, max(0, count - len(self.table))))[:count]

    def chunks(self, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Rows a:b of each span as requests of one batch, each seeing the keys up to its end."""
        from jetrl_kernels.attention_parts import PART
        from jetrl_megatron.engine_ops.flash_attention import cut, cut_paged

        counts, longest_k = [b - a for a, b in spans], max(b for _, b in spans)
        starts = _int32([0, *counts]).cumsum(0).int()
        cuts = cut(starts, _int32([b for _, b in spans]), sum(counts), longest_k)
        own_pages = self.pages(cuts.parts * PART // self.PAGE).repeat(len(spans), 1).view(-1, PART // self.PAGE)
        q = torch.cat([self.q[a:b] for a, b in spans])
        out = torch.empty_like(q)
        cut_paged(q, self.k_cache, self.v_cache, cuts, own_pages, max(counts), self.scale, out)
        return list(out.split(counts))

    def one_call(self, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
        """The same by vLLM's call with one split, uncut."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        counts = [b - a for a, b in spans]
        out = flash_attn_varlen_func(
            q=torch.cat([self.q[a:b] for a, b in spans]), k=self.k_cache, v=self.v_cache, max_seqlen_q=max(counts),
            max_seqlen_k=max(b for _, b in spans), cu_seqlens_q=_int32([0, *counts]).cumsum(0).int(),
            seqused_k=_int32([b for _, b in spans]), causal=True, softmax_scale=self.scale,
            block_table=self.table.repeat(len(spans), 1), fa_version=3, num_splits=1,
        )  # fmt: skip
        return list(out.split(counts))


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


HEADS = pytest.mark.parametrize("heads, kv_heads", [(16, 8), (32, 8), (16, 4), (8, 1)])
ENDS = [1, 127, 129, 513, 2048, 4095, 4096, 4097, 5000, 8191, 8192, 8193, 8999, 9000]
"""Contexts around the borders of tiles and of parts."""


@HEADS
def test_attention_of_short_contexts_is_one_call(heads: int, kv_heads: int) -> None:
    """Up to one part, trainer and engine give what vLLM gives with one split, packed, in pages, chunks and decode."""
    case = Sequence(heads, kv_heads)
    for spans in ([(0, 4096)], [(0, 700), (700, 701), (701, 1500), (1500, 4096)], [(e - 1, e) for e in ENDS[:7]]):
        for cut, whole, (a, b) in zip(case.chunks(spans), case.one_call(spans), spans):
            assert torch.equal(cut, case.want[a:b]), (a, b)
            assert torch.equal(whole, case.want[a:b]), (a, b)


@HEADS
def test_attention_is_the_same_in_decode_chunks_pages_and_packed(heads: int, kv_heads: int) -> None:
    case = Sequence(heads, kv_heads)
    spans = [(0, 9000), (3000, 5000), (4095, 4097), (8190, 9000), (5000, 5001), (0, 10), (8192, 8193), (4096, 4100)]
    for batch in (spans, spans[1:], *([span] for span in spans)):
        for rows, (a, b) in zip(case.chunks(batch), batch):
            assert torch.equal(rows, case.want[a:b]), (a, b, len(batch))


@HEADS
def test_attention_of_a_captured_decode_is_that_of_the_packed_row(heads: int, kv_heads: int) -> None:
    """One graph with room for 5 parts, replayed over batches of other contexts, with padding behind them."""
    from jetrl_kernels.attention_parts import PART
    from jetrl_megatron.engine_ops.flash_attention import DecodeCuts, cut_decode

    case, parts, room = Sequence(heads, kv_heads), 5, 16
    buffers, lengths = DecodeCuts.empty(32, parts, case.PAGE, "cuda"), _int32([1] * room)
    table = case.pages(parts * PART // case.PAGE).repeat(room, 1)
    q = case.q[:room].clone()
    out = torch.empty_like(q)

    def run() -> None:
        cut_decode(q, case.k_cache, case.v_cache, buffers.first(room, lengths), case.scale, out)

    buffers.fill(lengths, table)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for ends in (ENDS, [9000], [4096] * room, ENDS[::-1]):
        padded = [*ends, *[0] * (room - len(ends))]
        lengths.copy_(_int32(padded))
        q.copy_(case.q[[max(0, e - 1) for e in padded]])
        buffers.fill(lengths, table)
        graph.replay()
        assert torch.equal(out[: len(ends)], case.want[[e - 1 for e in ends]])
        assert not out[len(ends) :].any()


def _textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention in FP32, head by head: q `[T, N, D]`, k and v `[T, 1, D]`."""
    future = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device="cuda").triu(1)
    scores = ((q[:, n] @ k[:, 0].t() * scale).masked_fill(future, -torch.inf) for n in range(q.shape[1]))
    return torch.stack([x.softmax(-1) @ v[:, 0] for x in scores], 1)


def test_cutting_is_as_near_to_the_truth_as_one_call_and_so_are_gradients() -> None:
    """Parts are rounded to BF16, their sums and statistics are not: at most a quarter of one call's error comes on."""
    from jetrl_kernels.attention_parts import PART
    from jetrl_megatron.megatron import gpu

    module, case, first = sys.modules[gpu.attention.__module__], Sequence(3, 1), Sequence.OTHER
    q, k, v = (x[first:] for x in case.packed)
    grad, bounds = _heavy(case.LENGTH, 3 * case.DIM, seed=8), _int32([0, case.LENGTH])
    found = {}
    for name, part in (("cut", PART), ("whole", 1 << 20), ("truth", 0)):
        x = [(t.float() if name == "truth" else t).clone().requires_grad_() for t in (q, k, v)]
        if name == "truth":
            out = _textbook(x[0], x[1], x[2], case.scale).flatten(1)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "PART", part)
                out = gpu.attention(x[0], x[1], x[2], bounds, case.scale)
        out.backward(grad.to(out.dtype))
        found[name] = [t.detach().float() for t in (out, *(t.grad for t in x)) if t is not None]
    cut, whole, truth = found["cut"], found["whole"], found["truth"]
    assert torch.equal(cut[0][:PART], whole[0][:PART]) and not torch.equal(cut[0], whole[0])
    for name, ours, other, want in zip(("out", "dq", "dk", "dv"), cut, whole, truth):
        mine, theirs = (float((x - want).norm() / want.norm()) for x in (ours, other))
        print(f"{name}: error {mine:.2e} cut, {theirs:.2e} in one call")
        assert mine < 1.25 * theirs + 1e-4 and mine < 2e-2, name


CASES = {
    # name: what differs from a plain comparison
    "temperature": {"temperature": 0.7, "again": True, "prompt": 40, "new": 200},
    "preemption": {"sequences": 48, "prompt": 16, "new": 600, "memory_gib": 0.03, "layers": True},
    "chunks": {"sequences": 6, "prompt": 900, "new": 300, "again": True},
    "parts": {"sequences": 6, "prompt": 4000, "new": 300, "again": True, "layers": True},
    "long": {"sequences": 3, "prompt": 8100, "new": 200, "layers": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_engine_under_strain_has_the_trainers_log_probs(case: str, tmp_path: Path) -> None:
    """Compiled and captured: prefixes from the cache, prompts in chunks, requests set back, contexts over borders."""
    from jetrl_megatron.tiny import make_tiny_model

    model = make_tiny_model(tmp_path / "model", 7, heads=4, kv_heads=2, hidden=512, ffn=1024, max_positions=16384)
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
