"""Stochastic cast: Philox itself, unbiasedness, independence of sharding."""

import math

import pytest
import torch

from jetrl_kernels.master_cast import master_cast, master_quant
from jetrl_kernels.master_cast.reference import philox
from jetrl_kernels.quant_weight import quant_weight


@pytest.mark.parametrize(
    ("counter", "words", "key", "want"),
    [
        # Known answers of Random123's kat_vectors (philox4x32, 10 rounds).
        (0, (0, 0), (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (-1, (2**32 - 1, 2**32 - 1), (2**32 - 1, 2**32 - 1), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x85A308D3243F6A88 - (1 << 64),
            (0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, words, key, want):
    assert [int(x) for x in philox(torch.tensor([counter]), words, key)] == want


def test_nearest_is_torch():
    x = torch.randn(100)
    assert torch.equal(master_cast(x), x.bfloat16())


def test_stochastic_is_one_of_the_two_neighbours_and_unbiased():
    x = torch.full((400, 500), 1.0 + 0.3 * 2**-7)
    y = master_cast(x, "stochastic", seed=1).float()
    assert set(y.unique().tolist()) == {1.0, 1.0 + 2**-7}
    up = float((y > 1).float().mean())
    assert abs(up - 0.3) < 5 * math.sqrt(0.21 / x.numel())
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(master_cast(exact, "stochastic").float(), exact)


def test_independent_of_sharding():
    x = torch.randn(64, 96)
    whole = master_cast(x, "stochastic", seed=3, step=7, tensor_id=11)
    for r0, r1, c0, c1 in ((0, 32, 0, 96), (32, 64, 0, 96), (5, 9, 17, 50)):
        part = master_cast(
            x[r0:r1, c0:c1], "stochastic", seed=3, step=7, tensor_id=11, row0=r0, col0=c0, global_cols=96
        )
        assert torch.equal(part, whole[r0:r1, c0:c1])
    flat = master_cast(x.view(-1), "stochastic", seed=3, step=7, tensor_id=11)
    assert torch.equal(flat.view(64, 96), whole)


@pytest.mark.parametrize("changed", ["seed", "step", "tensor_id"])
def test_every_part_of_the_key_counts(changed):
    x = torch.randn(1000)
    assert not torch.equal(master_cast(x, "stochastic"), master_cast(x, "stochastic", **{changed: 1}))


def test_edges():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1.5])
    for step in range(20):
        y = master_cast(x, "stochastic", step=step)
        assert bool(torch.isfinite(y[:2]).all()) and y[2:4].tolist() == [math.inf, -math.inf]
        assert y[4:6].view(torch.int16).tolist() == [0, -32768] and float(y[7]) == -1.5
    assert bool(torch.isnan(master_cast(torch.tensor([math.nan]), "stochastic")).all())


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_one_pass_gives_the_bytes_of_two(rounding):
    x = torch.randn(200, 300)
    weight, q = master_quant(x, "pow2", rounding, seed=5, transposed=True)
    want = quant_weight(master_cast(x, rounding, seed=5))
    assert torch.equal(q.codes.view(torch.uint8), want.codes.view(torch.uint8)) and torch.equal(q.scale, want.scale)
    assert torch.equal(weight, master_cast(x, rounding, seed=5))


def test_out_and_errors():
    x, out = torch.randn(8, 8), torch.empty(8, 8, dtype=torch.bfloat16)
    assert master_cast(x, out=out) is out and torch.equal(out, x.bfloat16())
    with pytest.raises(TypeError, match="bfloat16"):
        master_cast(x.bfloat16())
    with pytest.raises(ValueError, match="'up' is not one of nearest, stochastic"):
        master_cast(x, "up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not lie in 9 columns"):
        master_cast(x, col0=2, global_cols=9)
