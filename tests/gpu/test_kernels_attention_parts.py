"""The kernel that merges attention over parts: against float64, and the same bits however its inputs lie."""

from __future__ import annotations

import os

import pytest
import torch

from jetrl_kernels.attention_parts import kernel
from jetrl_kernels.attention_parts.test_attention_parts import LENGTHS, attended

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("own_last", [False, True])
@pytest.mark.parametrize("heads, dim", [(3, 16), (32, 128)])
def test_merged_parts(heads: int, dim: int, own_last: bool) -> None:
    *inputs, whole, total = attended(LENGTHS, 8, heads, dim, own_last, torch.bfloat16)
    parts, lse, lengths = (x.to(DEVICE) for x in inputs)
    out, out_lse = kernel.merge_parts(parts, lse, lengths, 8, own_last, None)
    assert torch.equal(out[:3], parts[-1 if own_last else 0, :3])
    assert not out[LENGTHS.index(0)].any()
    # A rounding to BF16 (2**-8) of each part and one of the result; parts may be larger than their sum.
    torch.testing.assert_close(out.double().cpu(), whole, atol=2**-7, rtol=2**-7)
    torch.testing.assert_close(out_lse.double().cpu(), total, atol=1e-5, rtol=1e-6)


def test_bits_do_not_depend_on_layout_and_neighbours() -> None:
    """Planes as the trainer has them, against parts side by side as in decode, alone and with more planes."""
    parts, lse, lengths, *_ = attended(LENGTHS, 8, 5, 64, dtype=torch.bfloat16)
    parts, lse, lengths = (x.to(DEVICE) for x in (parts, lse, lengths))
    want, want_lse = kernel.merge_parts(parts, lse, lengths, 8, False, None)
    beside = parts.transpose(0, 1).contiguous().transpose(0, 1), lse.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    wide = torch.empty(len(LENGTHS), 2, 5, 64, dtype=torch.bfloat16, device=DEVICE)
    got, got_lse = kernel.merge_parts(*beside, lengths, 8, False, wide[:, 1])
    assert torch.equal(got, want) and torch.equal(got_lse, want_lse) and torch.equal(wide[:, 1], want)
    for t, length in enumerate(LENGTHS):
        alone, alone_lse = kernel.merge_parts(
            parts[:, t : t + 1], lse[..., t : t + 1].contiguous(), lengths[t : t + 1], 8, False, None
        )
        assert torch.equal(alone[0], want[t]) and torch.equal(alone_lse[:, 0], want_lse[:, t]), length
    # The own part last, as in prefill: moved to a further plane.
    count = (lengths + 7) // 8
    more, more_lse = torch.cat((parts, parts[:1])), torch.cat((lse, lse[:1]))
    for t in range(len(LENGTHS)):
        more[-1, t], more_lse[-1, :, t] = parts[count[t] - 1, t], lse[count[t] - 1, :, t]
    got, got_lse = kernel.merge_parts(more, more_lse, lengths, 8, True, None)
    assert torch.equal(got, want) and torch.equal(got_lse, want_lse)


@pytest.mark.skipif(INTERPRETED, reason="NaN of a part is the kernel's affair on a GPU")
def test_nan_is_not_hidden() -> None:
    parts, lse, lengths, *_ = attended([20, 20], 8, 4, 64, dtype=torch.bfloat16)
    parts[1, 0, 2] = float("nan")
    lse[1, 2, 0] = -float("inf")  # what FlashAttention says of a row of NaN
    out, _ = kernel.merge_parts(parts.cuda(), lse.cuda(), lengths.cuda(), 8, False, None)
    assert out[0, 2].isnan().all() and out.isnan().sum() == 64
