"""Digest: additive over shards, sensitive to every move and every bit."""

import pytest
import torch

from jetrl_kernels.digest import Digests, Shard, combine, digest
from jetrl_kernels.quant_weight import quant_weight


def tensors():
    torch.manual_seed(0)
    q = quant_weight(torch.randn(384, 260))
    return [
        q.codes,
        q.scale,
        torch.randn(30, 7).bfloat16(),
        torch.randn(5, 3),
        torch.arange(11),
        torch.randn(9).double(),
    ]


@pytest.mark.parametrize("index", range(6))
def test_sum_over_any_shards_is_the_digest_of_the_whole(index):
    t = tensors()[index]
    grid = t.reshape(1, -1) if t.dim() == 1 else t
    rows, cols = grid.shape
    assert digest(t) == digest(grid)
    for row_cuts, col_cuts in (([rows // 2], [1]), ([1], [cols // 3, cols // 2]), ([], [5 % cols])):
        parts = []
        for r0, r1 in zip([0, *row_cuts], [*row_cuts, rows]):
            for c0, c1 in zip([0, *col_cuts], [*col_cuts, cols]):
                parts.append(digest(grid[r0:r1, c0:c1], row0=r0, col0=c0, global_cols=cols))
        assert combine(parts) == digest(t)


def test_it_is_64_bits_and_stable():
    # Golden: the definition evaluated in Python integers. A change here breaks trainers that talk to older engines.
    def splitmix(position: int, seed: int) -> int:
        mask = 2**64 - 1
        x = ((position + 1) * 0x9E3779B97F4A7C15 + seed) & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return (x ^ x >> 31) | 1

    t = torch.tensor([[1, 2, 3, 4, 250], [6, 0, 8, 9, 10]], dtype=torch.uint8)
    want = 0
    for r in range(2):
        for c in range(5):
            key = splitmix(r, 0x243F6A8885A308D3) * (splitmix(c // 4, 0x13198A2E03707344) << 8 * (c % 4))
            want += (int(t[r, c]) + 1) * key
    assert digest(t) == want % 2**64


def test_every_bit_counts():
    t = torch.zeros(3, 40, dtype=torch.uint8)
    seen = {digest(t)}
    for r in range(3):
        for c in range(40):
            for bit in range(8):
                flipped = t.clone()
                flipped[r, c] = 1 << bit
                seen.add(digest(flipped))
    assert len(seen) == 1 + 3 * 40 * 8


def test_swaps_change_it():
    q = quant_weight(torch.randn(512, 256))
    whole = digest(q.codes)
    heads = q.codes.view(torch.uint8).view(4, 128, 256)
    assert digest(heads[[1, 0, 2, 3]].reshape(512, 256)) != whole
    rows = torch.arange(512)
    rows[[5, 6]] = rows[[6, 5]]
    assert digest(q.codes.view(torch.uint8)[rows]) != whole
    scales = digest(q.scale)
    swapped = q.scale.clone()
    swapped[0, 0], swapped[1, 0] = 0.5, 0.25
    other = swapped.clone()
    other[0, 0], other[1, 0] = 0.25, 0.5
    assert len({scales, digest(swapped), digest(other)}) == 3


def test_zeros_count_and_strides_do_not():
    assert digest(torch.zeros(4, 4)) != digest(torch.zeros(3, 4)) != digest(torch.zeros(4, 3))
    t = torch.randn(64, 48)
    assert digest(t.t().contiguous().t()) == digest(t)
    assert digest(torch.zeros(0, 4)) == 0
    assert digest(torch.ones(1, 4).t()[:1]) == digest(torch.ones(1, 1))  # one element, stride 4


def test_a_large_tensor_is_cut_into_pieces():
    t = torch.randn(3000, 2000).to(torch.float8_e4m3fn)
    assert combine([digest(t[:1700]), digest(t[1700:], row0=1700)]) == digest(t)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"\(2, 2, 2\)"):
        digest(torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match=r"columns 3\.\.7 lie outside of a tensor of 6 columns"):
        digest(torch.zeros(2, 4), col0=3, global_cols=6)


def test_many_tensors_are_digested_from_shards_that_change():
    whole = [torch.randn(40, 12).bfloat16(), torch.randn(7), torch.empty(0, 5)]
    cut = [Shard(0, whole[0][:, :5], 0, 0, 12), Shard(0, whole[0][30:, 5:], 30, 5, 12)]
    shards = [*cut, Shard(1, whole[1], 0, 0, 7), Shard(0, whole[0][:30, 5:], 0, 5, 12), Shard(2, whole[2], 0, 0, 5)]
    digests = Digests(shards, 4)
    for _ in range(2):
        assert digests() == [digest(whole[0]), digest(whole[1]), 0, 0]
        whole[0][3, 4] += 1
        whole[1].neg_()
    with pytest.raises(ValueError, match="lie 12 apart"):
        Digests([Shard(0, whole[0].T, 0, 0, 40)], 1)
