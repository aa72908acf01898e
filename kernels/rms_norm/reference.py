"""RMSNorm in plain torch. The sum of squares is taken in float64, so that its order does not show after rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """BF16 result [..., H] and FP32 reciprocal RMS [..., 1]."""
    mean_square = x.double().square().mean(-1, keepdim=True).float()
    rstd = torch.rsqrt(mean_square + eps)
    return (x.float() * rstd).to(torch.bfloat16) * weight.to(torch.bfloat16), rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dX [..., H] BF16 and dW [H] FP32.

    With n = x * rstd and g = dy * weight: dX = rstd * (g - n * mean(g * n)), dW = sum over rows of dy * n.
    """
    normed = x.float() * rstd
    scaled = dy.float() * weight.float()
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dw = (dy.float() * normed).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(torch.bfloat16), dw
