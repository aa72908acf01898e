"""Weight quantizer: edge tiles, odd sides, bytes through BF16, error."""

import math

import pytest
import torch

from jetrl_kernels.formats import AMAX_FLOOR
from jetrl_kernels.quant_weight import QuantizedWeight, dequant_weight, quant_weight
from jetrl_kernels.scales import NonFiniteError, refuse_nonfinite


@pytest.mark.parametrize("policy", ["pow2", "fp32"])
def test_zero_and_tiny_tiles(policy):
    for fill in (0.0, 1e-37, 1e-40):
        w = torch.zeros(256, 256, dtype=torch.bfloat16)
        w[0, 0] = 1
        w[128:, 128:] = fill
        q = quant_weight(w, policy)
        zero = q.codes.view(torch.uint8)[w == 0]
        assert not bool(zero.any())
        assert bool((torch.isfinite(q.scale) & (q.scale > 0)).all())
        back = dequant_weight(q.codes, q.scale, torch.float32)
        assert bool(torch.isfinite(back).all())
        tile = w[128:, 128:].float()
        assert float((back[128:, 128:] - tile).abs().max()) <= float(tile.abs().max())


@pytest.mark.parametrize("shape", [(576, 2048), (4544, 768), (192, 320), (64, 64), (1, 1), (129, 127)])
@pytest.mark.parametrize("policy", ["pow2", "fp32"])
def test_sides_that_128_does_not_divide(shape, policy):
    w = torch.randn(shape).bfloat16()
    q = quant_weight(w, policy)
    assert q.codes.shape == shape
    # Each tile on its own gives the same bytes: nothing outside of a tile enters its amax.
    r, c = (shape[0] - 1) // 128 * 128, (shape[1] - 1) // 128 * 128
    tile = quant_weight(w[r:, c:], policy)
    assert torch.equal(tile.codes.view(torch.uint8), q.codes[r:, c:].view(torch.uint8))
    assert torch.equal(tile.scale, q.scale[-1:, -1:])


def test_fp32_goes_through_bf16():
    w = torch.randn(256, 256)
    a, b = quant_weight(w), quant_weight(w.bfloat16())
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scale, b.scale)


def test_transposed_codes_are_the_same_bytes():
    q = quant_weight(torch.randn(300, 200), transposed=True)
    assert q.codes_t is not None and q.codes_t.is_contiguous()
    assert torch.equal(q.codes_t.view(torch.uint8), q.codes.view(torch.uint8).t())


def test_all_256_codes_survive():
    # Finite codes times a power of two, with 448 present in the tile, come back as they were; -0.0 included.
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(80)[: 128 * 128].view(128, 128)
    values = codes.view(torch.float8_e4m3fn).float() * 2.0**-9
    q = quant_weight(values.bfloat16())
    assert torch.equal(q.codes.view(torch.uint8), codes) and float(q.scale) == 2.0**-9


def test_pow2_dequantization_is_exact_in_bf16():
    q = quant_weight(torch.randn(256, 384) * 0.02)
    exact = dequant_weight(q.codes, q.scale, torch.float32)
    assert torch.equal(dequant_weight(q.codes, q.scale).float(), exact)


def test_error_on_gaussian_and_heavy_tails():
    torch.manual_seed(0)
    gauss = torch.randn(1024, 1024).bfloat16()
    student = torch.distributions.StudentT(3.0).sample((1024, 1024)).bfloat16()
    bound = {("gauss", "pow2"): 0.028, ("gauss", "fp32"): 0.028, ("student", "pow2"): 0.037, ("student", "fp32"): 0.027}
    for name, w in (("gauss", gauss), ("student", student)):
        for policy in ("pow2", "fp32"):
            q = quant_weight(w, policy)
            error = (dequant_weight(q.codes, q.scale, torch.float32) - w.float()).norm() / w.float().norm()
            assert 0.02 < float(error) < bound[name, policy]


def test_nan_and_inf_poison_their_tile_only():
    w = torch.randn(256, 256)
    w[0, 0], w[255, 255] = math.nan, math.inf
    q = quant_weight(w)
    assert torch.isnan(q.scale).tolist() == [[True, False], [False, True]]
    assert not bool(q.codes[:128, :128].view(torch.uint8).any())
    with pytest.raises(NonFiniteError, match=r"layers\.3\.weight"):
        refuse_nonfinite({"layers.3.weight": q.scale})


def test_huge_weights_do_not_overflow():
    w = torch.full((128, 128), 3.0e38).bfloat16()  # what rounds up to 2**128 has no finite value
    q = quant_weight(w)
    assert bool(torch.isfinite(dequant_weight(q.codes, q.scale, torch.float32)).all())
    assert float(q.scale) > AMAX_FLOOR


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"\[out, in\], not a tensor of shape \(4,\)"):
        quant_weight(torch.zeros(4))
    with pytest.raises(TypeError, match="float16"):
        quant_weight(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"need a scale of shape \(2, 3\), not \(2, 4\)"):
        QuantizedWeight(torch.zeros(192, 320).to(torch.float8_e4m3fn), torch.ones(2, 4))
