"""Merged softmaxes against one softmax over all keys in float64."""

from __future__ import annotations

import pytest
import torch

from jetrl_kernels.attention_parts import merge_parts


def attended(lengths: list[int], part: int, heads: int = 3, dim: int = 16, own_last: bool = False, dtype=torch.float64):
    """(parts, lse, lengths, whole output, whole lse) of random scores and values; NaN wherever a token has no part."""
    generator = torch.Generator().manual_seed(0)
    planes, tokens = max(1, -(-max(lengths) // part)), len(lengths)
    parts = torch.full((planes, tokens, heads, dim), float("nan"), dtype=torch.float64)
    lse = torch.full((planes, heads, tokens), float("nan"), dtype=torch.float64)
    whole, total = torch.zeros(tokens, heads, dim, dtype=torch.float64), torch.zeros(heads, tokens, dtype=torch.float64)
    for t, length in enumerate(lengths):
        scores = 8 * torch.randn(heads, length, generator=generator, dtype=torch.float64)
        values = torch.randn(heads, length, dim, generator=generator, dtype=torch.float64)
        if length:
            whole[t] = (scores.softmax(-1)[..., None] * values).sum(1)
            total[:, t] = scores.logsumexp(-1)
        count = -(-length // part)
        for p in range(count):
            plane = planes - 1 if own_last and p == count - 1 else p
            of = slice(p * part, (p + 1) * part)
            parts[plane, t] = (scores[:, of].softmax(-1)[..., None] * values[:, of]).sum(1)
            lse[plane, :, t] = scores[:, of].logsumexp(-1)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return parts.to(dtype), lse.to(lse_dtype), torch.tensor(lengths, dtype=torch.int32), whole, total


LENGTHS = [1, 7, 8, 9, 0, 16, 17, 24, 31]


@pytest.mark.parametrize("own_last", [False, True])
def test_parts_merge_to_the_whole(own_last: bool) -> None:
    # The reference's formula in float64, without the check of the public function that wants FP32.
    from jetrl_kernels.attention_parts import reference

    parts, lse, lengths, whole, total = attended(LENGTHS, 8, own_last=own_last)
    out, out_lse = reference.merge_parts(parts, lse, lengths, 8, own_last, None)
    torch.testing.assert_close(out, whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(out_lse, total, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("own_last", [False, True])
def test_a_single_part_is_passed_on_and_rounding_is_bounded(own_last: bool) -> None:
    parts, lse, lengths, whole, total = attended(LENGTHS, 8, own_last=own_last, dtype=torch.bfloat16)
    out, out_lse = merge_parts(parts, lse, lengths, part=8, own_last=own_last, out=torch.empty_like(parts[0]))
    single = parts[-1 if own_last else 0]
    assert torch.equal(out[:3], single[:3]) and not out[4].any()
    # A rounding to BF16 (2**-8) of each part and one of the result; parts may be larger than their sum.
    torch.testing.assert_close(out.double(), whole, atol=2**-7, rtol=2**-7)
    torch.testing.assert_close(out_lse.double(), total, atol=1e-5, rtol=1e-6)


def test_what_does_not_fit_is_named_at_once() -> None:
    parts, lse, lengths, *_ = attended([9, 3], 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"lse: expected FP32 \[2, 3, 2\].*lengths: expected int32.*side by side"):
        merge_parts(parts.transpose(2, 3).contiguous().transpose(2, 3), lse.double(), lengths.long(), part=8)
