"""Packing of sequences: every sampled token is predicted once, padding never counts, ranks get equal shares."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_megatron.batch import Sample, balance, micro_batches, pack, split_for_ranks

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


def sample(number: int, prompt: int, response: int) -> Sample:
    return Sample(
        prompt_ids=[100 * number + i for i in range(prompt)],
        response_ids=[100 * number + 50 + i for i in range(response)],
        engine_logp=[-float(number) - i / 16 for i in range(response)],
        policy_version=0,
        group=number,
        finish_reason="stop",
        advantage=float(number),
    )


@settings(deadline=None)
@given(lengths, st.integers(0, 5))
def test_each_sampled_token_is_the_target_of_the_position_before_it(sizes, padding):
    made = [sample(i, *size) for i, size in enumerate(sizes)]
    used = sum(len(s) for s in made)
    batch = pack(made, used + padding)
    assert batch.targets[batch.mask].tolist() == [t for s in made for t in s.response_ids]
    assert batch.engine_logp[batch.mask].tolist() == [x for s in made for x in s.engine_logp]
    assert batch.advantages[batch.mask].tolist() == [s.advantage for s in made for _ in s.response_ids]
    assert batch.cu_seqlens[-1] == used + padding
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:]):
        assert batch.positions[start:end].tolist() == list(range(end - start))
        assert len(set(batch.sequence[start:end].tolist())) == 1
    assert not batch.mask[used:].any()


def test_sequences_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        pack([sample(0, 3, 3)], 5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=8, max_size=64).filter(lambda s: len(s) % 8 == 0))
def test_ranks_get_equal_counts_every_sequence_once_and_balanced_tokens(sizes):
    made = [sample(i, 1, n) for i, n in enumerate(sizes)]
    for dp in (1, 2, 4, 8):
        shares = split_for_ranks(made, dp, 3)
        assert {len(share) for share in shares} == {len(made) // dp}
        assert sorted(i for share in shares for i in share) == list(range(len(made)))
        loads = [sum(len(made[i]) for i in share) for share in shares]
        # No two ranks could do better by any exchange, so none is ahead by more than the range of lengths.
        assert max(loads) - min(loads) <= max(sizes) - min(sizes)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=4, max_size=8).filter(lambda s: len(s) % 2 == 0))
def test_two_ranks_come_close_to_the_best_split_there_is(sizes):
    half = itertools.combinations(range(len(sizes)), len(sizes) // 2)
    best = min(abs(sum(sizes) - 2 * sum(sizes[i] for i in chosen)) for chosen in half)
    loads = [sum(sizes[i] for i in part) for part in balance(sizes, [len(sizes) // 2] * 2)]
    assert abs(loads[0] - loads[1]) <= best + max(sizes) / 2


def test_micro_batches_of_a_long_tail_are_balanced():
    """Lengths as of sampled answers: most short, a few at the limit. In order of sampling the padding is half of it."""
    generator = torch.Generator().manual_seed(0)
    tail = torch.randn(256, generator=generator).mul(1.2).exp().mul(300).clamp(16, 4096).int().tolist()
    made = [sample(i, 16, n) for i, n in enumerate(tail)]
    used = sum(map(len, made))

    def padded(shares) -> int:
        return sum(b.tokens.numel() for rank in range(4) for b in micro_batches(made, shares, rank, 8, 128))

    assert padded(split_for_ranks(made, 4, 8)) < 1.15 * used
    assert padded([list(range(64 * r, 64 * r + 64)) for r in range(4)]) > 1.5 * used


def test_bins_that_do_not_hold_everything_are_refused():
    with pytest.raises(ValueError, match="do not hold 3"):
        balance([1, 2, 3], [1, 1])


@settings(deadline=None)
@given(lengths.filter(lambda s: len(s) % 2 == 0), st.integers(1, 3), st.sampled_from([1, 2, 16]))
def test_micro_batches_of_all_ranks_have_one_length(sizes, size, multiple):
    made = [sample(i, *s) for i, s in enumerate(sizes)]
    shares = split_for_ranks(made, 2, size)
    cut = [micro_batches(made, shares, rank, size, multiple) for rank in range(2)]
    assert len({len(c) for c in cut}) == 1
    assert len({b.tokens.numel() for c in cut for b in c}) == 1
    assert cut[0][0].tokens.numel() % multiple == 0
    tokens = torch.cat([b.targets[b.mask] for c in cut for b in c])
    assert sorted(tokens.tolist()) == sorted(t for s in made for t in s.response_ids)
