"""Scales: exact powers of two, the floor, poison for NaN and Inf."""

import math

import pytest
import torch

from jetrl_kernels.formats import AMAX_FLOOR, E4M3_MAX, MIN_SCALE, check_policy, scale_shape
from jetrl_kernels.scales import NonFiniteError, has_nonfinite, pow2_ceil, refuse_nonfinite, scale_from_amax


def test_scale_shape_of_sides_that_128_does_not_divide():
    shapes = [(576, 2048), (4544, 768), (192, 320), (64, 64)]
    assert [scale_shape(*s) for s in shapes] == [(5, 16), (36, 6), (2, 3), (1, 1)]


def test_unknown_policy_is_named():
    with pytest.raises(ValueError, match="'e8m0' is not one of pow2, fp32"):
        check_policy("e8m0")


@pytest.mark.parametrize("k", range(-30, 31))
def test_power_of_two_rounds_up_exactly(k):
    power = torch.tensor(2.0**k)
    below, above = torch.nextafter(power, torch.tensor(0.0)), torch.nextafter(power, torch.tensor(math.inf))
    got = pow2_ceil(torch.stack([below, power, above]))
    assert torch.equal(got, torch.tensor([2.0**k, 2.0**k, 2.0 ** (k + 1)]))
    # The same through amax: amax / 448 at, just under and just over a power of two.
    amax = torch.tensor(448.0 * 2.0**k)
    around = torch.stack(
        [torch.nextafter(amax, torch.tensor(0.0)), amax, torch.nextafter(amax, torch.tensor(math.inf))]
    )
    assert torch.equal(scale_from_amax(around, "pow2"), torch.tensor([2.0**k, 2.0**k, 2.0 ** (k + 1)]))


def test_pow2_scale_is_the_smallest_that_does_not_saturate():
    # Every BF16 magnitude above the floor, against exact rational arithmetic in float64.
    amax = torch.arange(0, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    amax = amax[amax >= AMAX_FLOOR]
    scale = scale_from_amax(amax, "pow2").double()
    mantissa, _ = torch.frexp(scale)
    assert bool((mantissa == 0.5).all())
    assert bool((amax.double() <= scale * E4M3_MAX).all()) and bool((amax.double() > scale / 2 * E4M3_MAX).all())


def test_fp32_scale_is_the_rounded_quotient():
    amax = torch.rand(1000, dtype=torch.float64).float() * 100 + 1e-3
    assert torch.equal(scale_from_amax(amax, "fp32"), (amax.double() / 448).float())


@pytest.mark.parametrize("policy", ["pow2", "fp32"])
def test_floor_and_poison(policy):
    amax = torch.tensor([0.0, 1e-40, AMAX_FLOOR, 3.3895e38, math.inf, math.nan])
    scale = scale_from_amax(amax, policy)
    assert torch.equal(scale[:3], torch.full((3,), MIN_SCALE))
    assert bool(torch.isfinite(scale[3]) and scale[3] > 0)
    assert bool(torch.isnan(scale[4:]).all())
    assert bool(has_nonfinite(scale)) and not bool(has_nonfinite(scale[:4]))


def test_refuse_nonfinite_names_every_tensor():
    good, bad = torch.ones(2, 2), torch.tensor([[1.0, math.nan]])
    refuse_nonfinite({"a": good})
    with pytest.raises(NonFiniteError, match=r"NaN or Inf in b, c"):
        refuse_nonfinite({"a": good, "b": bad, "c": bad})
