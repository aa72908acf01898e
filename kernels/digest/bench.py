"""Digest: bytes read once, against the speed of a copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jetrl_kernels.bench_lib import Case
from jetrl_kernels.digest import digest_tensor


def cases() -> Iterator[Case]:
    """FP8 codes and BF16 weights of Qwen3-32B's size."""
    codes = torch.randn(51200, 5120, device="cuda").to(torch.float8_e4m3fn)
    weight = torch.randn(151936, 5120, device="cuda").bfloat16()
    yield Case("digest E4M3", "51200 x 5120", lambda: digest_tensor(codes), bytes=codes.numel())
    yield Case("digest BF16", "151936 x 5120", lambda: digest_tensor(weight), bytes=2 * weight.numel())
    odd = codes[:, 1:]
    yield Case("digest E4M3, unaligned", "51200 x 5119", lambda: digest_tensor(odd, col0=1), bytes=odd.numel())
