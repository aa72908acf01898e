"""Logits as the engine computes them, for whoever needs the same on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """FP32 logits `[T, vocab]` of hidden `[T, hidden]` and weight `[vocab, hidden]`, both BF16."""
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    # Products of BF16 numbers are exact in float64 and the error of their sum is far below an FP32 rounding: the result
    # does not depend on the order of summation, hence not on the batch, as an FP32 matmul's does.
    return (hidden.double() @ weight.double().t()).float()
