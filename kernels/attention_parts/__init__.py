"""Attention over keys that are cut at fixed positions: the constant, and how the results of the parts become one.

The keys of a query are cut at multiples of `PART`, wherever the query comes from and however long its context grows;
each part is attended by itself, and the parts are merged in order. So a long context keeps many thread blocks busy, and
a token's result still depends on its own context alone. A single part is passed on bit for bit.
Letters: P parts, T query tokens, N heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_kernels import fallbacks
from jetrl_kernels.attention_parts import reference

__all__ = ["PART", "merge_parts"]

PART = 4096
"""Keys of a part, in trainer and engine: a multiple of FlashAttention's tile (128 keys) and of a page of the cache."""


def merge_parts(
    parts: Tensor, lse: Tensor, lengths: Tensor, *, part: int = PART, own_last: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax over all keys of a token, from softmaxes over its parts.

    With n = ceil(length / part) parts of a token, m their largest lse and w_p = exp2(log2(e) (lse_p - m)), in FP32 and
    from part 0 upwards, every product and sum rounded: `out = (sum of w_p x_p) / (sum of w_p)`, rounded to BF16 once.

    Args:
        parts: `[P, T, N, D]` BF16, D a power of two from 16 on for the kernel; last two dimensions contiguous. What a
            token has no part of is not read.
        lse: FP32 `[P, N, T]`, natural log-sum-exp of each part's scaled scores.
        lengths: int32 `[T]`, keys that a token sees. Tokens that see none (padding of a batch) become zeros.
        own_last: part n - 1, the one that a token is in itself, is found at P - 1, the others at their numbers.
        out: `[T, N, D]` BF16 to write to, last two dimensions contiguous.

    Returns:
        (`[T, N, D]` BF16, lse FP32 `[N, T]` over all keys).

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    planes, tokens, heads, dim = parts.shape
    problems = []
    if lse.shape != (planes, heads, tokens) or lse.dtype != torch.float32:
        problems.append(f"lse: expected FP32 [{planes}, {heads}, {tokens}], not {lse.dtype} {list(lse.shape)}")
    if lengths.shape != (tokens,) or lengths.dtype != torch.int32:
        problems.append(f"lengths: expected int32 [{tokens}], not {lengths.dtype} {list(lengths.shape)}")
    if out is not None and (out.shape != parts.shape[1:] or out.dtype != parts.dtype):
        problems.append(f"out: expected {parts.dtype} [{tokens}, {heads}, {dim}], not {out.dtype} {list(out.shape)}")
    problems += [
        f"{name}: heads must lie side by side, not {x.stride()}"
        for name, x in (("parts", parts), ("out", out))
        if x is not None and x.stride()[-2:] != (dim, 1)
    ]
    if problems:
        raise ValueError(f"merge_parts: {'; '.join(problems)}")
    if parts.is_cuda:
        if parts.dtype == torch.bfloat16 and dim >= 16 and not dim & (dim - 1):
            from jetrl_kernels.attention_parts import kernel

            return kernel.merge_parts(parts, lse, lengths, part, own_last, out)
        fallbacks.note("attention_parts", f"heads of {dim} in {parts.dtype}: not BF16, or no power of two from 16 on")
    return reference.merge_parts(parts, lse, lengths, part, own_last, out)
