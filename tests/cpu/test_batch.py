"""Packing of sequences: every sampled token is predicted once, padding never counts, ranks get equal shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetrl_megatron.batch import Sample, micro_batches, pack, split_for_ranks

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


@given(lengths.filter(lambda s: len(s) % 2 == 0))
def test_ranks_get_equal_counts_and_every_sequence_once(sizes):
    made = [sample(i, *size) for i, size in enumerate(sizes)]
    shares = split_for_ranks(made, 2)
    assert len(shares[0]) == len(shares[1])
    assert sorted(shares[0] + shares[1]) == list(range(len(made)))


def test_tokens_are_balanced_over_ranks():
    made = [sample(i, 1, n) for i, n in enumerate([64, 1, 1, 1, 32, 32, 1, 1])]
    loads = [sum(len(made[i]) for i in share) for share in split_for_ranks(made, 2)]
    assert max(loads) - min(loads) <= 4


@given(lengths.filter(lambda s: len(s) % 2 == 0), st.integers(1, 3), st.sampled_from([1, 2, 16]))
def test_micro_batches_of_all_ranks_have_one_length(sizes, size, multiple):
    made = [sample(i, *s) for i, s in enumerate(sizes)]
    shares = split_for_ranks(made, 2)
    cut = [micro_batches(made, shares, rank, size, multiple) for rank in range(2)]
    assert len({len(c) for c in cut}) == 1
    assert len({b.tokens.numel() for c in cut for b in c}) == 1
    assert cut[0][0].tokens.numel() % multiple == 0
    tokens = torch.cat([b.targets[b.mask] for c in cut for b in c])
    assert sorted(tokens.tolist()) == sorted(t for s in made for t in s.response_ids)
