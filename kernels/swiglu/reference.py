"""SwiGLU in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., F] BF16 from [..., 2F] BF16."""
    gate, up = gate_up.chunk(2, -1)
    g = gate.float()
    # x / (1 + exp(-x)), as the engine's kernel writes it, elementwise so that vector width cannot matter.
    return (g / (1.0 + torch.exp(-g))).to(torch.bfloat16) * up


def silu_mul_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """[..., 2F] BF16: d gate = dy * up * s * (1 + g * (1 - s)), d up = dy * g * s, with s = sigmoid(g), in FP32."""
    gate, up = gate_up.float().chunk(2, -1)
    grad = dy.float()
    s = torch.sigmoid(gate)
    shared = grad * s
    d_gate = shared * (up * (1.0 + gate * (1.0 - s)))
    return torch.cat([d_gate, shared * gate], -1).to(torch.bfloat16)
