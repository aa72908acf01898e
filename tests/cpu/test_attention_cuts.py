"""Where keys are cut, in packed sequences, chunks of prompts and decode: each against attention over all keys.

FlashAttention 3 needs a Hopper GPU (`tests/gpu/test_exact.py` runs it); here a textbook function takes its place that
reads starts, rows, keys and pages as it does, in float64, so that a row or key too many shows.
"""

from __future__ import annotations

import math

import pytest
import torch

from jetrl_kernels.attention_parts import reference
from jetrl_megatron.engine_ops import flash_attention as flash

PART, PAGE, HEADS, GROUPS, DIM = 8, 4, 4, 2, 16


def textbook(q, k, v, scale, *, causal, starts, longest, longest_k, rows=None, starts_k=None, keys=None, pages=None,
             out=None):  # fmt: skip
    out = torch.full_like(q, math.nan) if out is None else out
    lse = torch.full((q.shape[1], q.shape[0]), math.nan, dtype=torch.float64)
    for s in range(starts.shape[0] - 1):
        begin = int(starts[s])
        end = int(starts[s + 1]) if rows is None else begin + int(rows[s])
        first_key, next_key = (0, 0) if starts_k is None else starts_k[s : s + 2].tolist()
        count = next_key - first_key if keys is None else int(keys[s])
        assert end - begin <= longest and (end == begin or count <= longest_k)
        if end == begin:
            continue
        if pages is not None:
            of_page = k.shape[1]
            slots = [int(pages[s, i // of_page]) * of_page + i % of_page for i in range(count)]
            mine = [x.flatten(0, 1)[slots] for x in (k, v)]
        else:
            mine = [x[first_key : first_key + count] for x in (k, v)]
        mine = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in mine]
        scores = scale * torch.einsum("qhd,khd->hqk", q[begin:end], mine[0])
        if causal:
            row, key = torch.arange(end - begin)[:, None], torch.arange(count)
            scores.masked_fill_(key > row + count - (end - begin), -math.inf)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), mine[1])
        lse[:, begin:end] = scores.logsumexp(-1)
    return out, lse


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    def merge(parts, lse, lengths, *, part, own_last=False, out=None):
        return reference.merge_parts(parts, lse, lengths, part, own_last, out)

    monkeypatch.setattr(flash, "flash_attention", textbook)
    monkeypatch.setattr(flash, "merge_parts", merge)


def tensors(*lengths: int):
    """q, k, v of packed sequences and their starts."""
    g = torch.Generator().manual_seed(sum(lengths))
    q, k, v = (torch.randn(sum(lengths), n, DIM, generator=g, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS))
    return q, k, v, torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


def whole(q, k, v, starts):
    longest = int(starts.diff().max())
    return textbook(q, k, v, 0.3, causal=True, starts=starts, starts_k=starts, longest=longest, longest_k=longest)


@pytest.mark.parametrize("lengths", [(9,), (8, 16, 1), (3, 25, 7, 33, 17), (24, 24)])
def test_packed_sequences(lengths: tuple[int, ...]) -> None:
    q, k, v, starts = tensors(*lengths)
    out, lse = flash.cut_packed(q, k, v, starts, max(lengths), 0.3, part=PART)
    want, want_lse = whole(q, k, v, starts)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=1e-12)


def paged(k, v, starts, columns: int):
    """Caches with pages at random places, and each sequence's table of `columns` pages."""
    counts = [-(-int(n) // PAGE) for n in starts.diff()]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int()
    caches = [torch.full((len(order), PAGE, GROUPS, DIM), math.nan, dtype=torch.float64) for _ in range(2)]
    tables, taken = torch.zeros(len(counts), columns, dtype=torch.int32), 0
    for s, count in enumerate(counts):
        tables[s, :count] = order[taken : taken + count]
        taken += count
        for i in range(int(starts[s + 1] - starts[s])):
            for cache, x in zip(caches, (k, v)):
                cache[tables[s, i // PAGE], i % PAGE] = x[starts[s] + i]
    return *caches, tables


@pytest.mark.parametrize(
    "chunks", [[(0, 30), (0, 5)], [(3, 30), (11, 12), (7, 9)], [(8, 16), (15, 33), (16, 17), (0, 8)]]
)
def test_chunks_of_prompts_and_decode_in_one_batch(chunks: list[tuple[int, int]]) -> None:
    q, k, v, starts = tensors(*(end for _, end in chunks))
    want, _ = whole(q, k, v, starts)
    rows = torch.cat([torch.arange(int(s) + a, int(s) + b) for s, (a, b) in zip(starts, chunks)])
    contexts = starts.diff()
    query_starts = torch.tensor([0, *(b - a for a, b in chunks)], dtype=torch.int32).cumsum(0).int()
    parts = flash.parts_of(int(contexts.max()), PART)
    k_cache, v_cache, tables = paged(k, v, starts, parts * PART // PAGE)
    cuts = flash.cut(query_starts, contexts, len(rows), int(contexts.max()), PART)
    out = torch.empty_like(q[rows])
    longest = max(b - a for a, b in chunks)
    flash.cut_paged(q[rows], k_cache, v_cache, cuts, tables.view(-1, PART // PAGE), longest, 0.3, out)
    torch.testing.assert_close(out, want[rows], atol=1e-12, rtol=1e-12)


def test_decode_with_padding() -> None:
    lengths = (1, 8, 9, 24, 25)
    q, k, v, starts = tensors(*lengths)
    want, _ = whole(q, k, v, starts)
    parts = 5  # more than any context has, as in a captured graph
    k_cache, v_cache, tables = paged(k, v, starts, parts * PART // PAGE)
    contexts = torch.tensor([*lengths, 0], dtype=torch.int32)
    cuts = flash.DecodeCuts.empty(8, parts, PAGE, "cpu", PART)
    cuts.fill(contexts, torch.cat((tables, torch.full_like(tables[:1], -1))))
    rows = torch.cat((q[starts[1:].long() - 1], q[:1]))
    out = torch.empty_like(rows)
    flash.cut_decode(rows, k_cache, v_cache, cuts.first(6, contexts), 0.3, out)
    torch.testing.assert_close(out[:5], want[starts[1:].long() - 1], atol=1e-12, rtol=1e-12)
    assert not out[5].any()
