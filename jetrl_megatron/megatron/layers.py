"""Modules of ours in Megatron's layer spec: linear layers, norm, activation and attention that the engine also runs.

Shapes: T tokens of a packed micro-batch, B=1, H hidden, N heads, D head_dim; `_p` is one tensor-parallel part.
Every class is built by a `ModuleSpec`, so its constructor has the signature that Megatron calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from jetrl_kernels.fp8_linear import fp8_linear
from jetrl_kernels.quant_weight import QuantizedWeight, quant_weight
from jetrl_kernels.rms_norm import rms_norm
from jetrl_kernels.swiglu import silu_mul
from jetrl_megatron.config import PrecisionConfig
from jetrl_megatron.engine_ops import attention, rope


class Fp8Weight:
    """What both parallel linears share: codes and scales, made once per optimizer step, consumed by every forward.

    The BF16 parameter is the optimizer's; a forward pass reads the bytes only, the very bytes a refit ships.
    """

    weight: Tensor
    precision: PrecisionConfig
    qweight: QuantizedWeight | None = None

    @torch.no_grad()
    def quantize(self, weight: Tensor | None = None) -> None:
        """Quantize the BF16 weight `[out_p, in_p]` in 128x128 tiles, into the storage that is already there.

        Args:
            weight: instead of the parameter's values, which `precision.fp8_param` does not keep.
        """
        source = self.weight if weight is None else weight
        # DGrad on a GPU wants the transposed bytes: made here once, instead of in every backward pass.
        fresh = quant_weight(source, self.precision.scales, transposed=source.is_cuda)
        if self.qweight is None:
            self.qweight = fresh
        else:
            self.qweight.codes.copy_(fresh.codes)
            self.qweight.scale.copy_(fresh.scale)
            if self.qweight.codes_t is not None and fresh.codes_t is not None:
                self.qweight.codes_t.copy_(fresh.codes_t)

    def _fp8(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype | None = None,
        initial: Tensor | None = None,
    ) -> Tensor:
        if self.qweight is None:
            raise RuntimeError("FP8 linear used before its weight was quantized")
        return fp8_linear(
            x,
            weight,
            self.qweight,
            bias,
            policy=self.precision.scales,
            wgrad=self.precision.wgrad,
            out_dtype=out_dtype,
            initial=initial,
        )


class Fp8ColumnParallelLinear(Fp8Weight, ColumnParallelLinear):
    """`Y_p = X W_p^T` with X `[T, 1, in]`, W_p `[out_p, in]`; X's gradient is summed over tensor-parallel ranks."""

    def _forward_impl(self, input, weight, bias=None, *, allreduce_dgrad, sequence_parallel, tp_group, **_):
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return self._fp8(input, weight, bias)


class Fp8RowParallelLinear(Fp8Weight, RowParallelLinear):
    """`Y = sum_p X_p W_p^T`: partial sums leave in FP32 and are rounded to BF16 once, after the reduction.

    A BF16 reduction would round each part first, and a tensor-parallel trainer would no longer match the engine.
    On a CPU each rank goes on from the accumulators of the rank before it, so that the K-blocks are added in the order
    in which an engine at TP=1 adds them, and the result is the same to the bit at any TP.
    """

    def _forward_impl(self, input, weight, bias=None, **_):
        # One rank rounds at once, in the GEMM, as the engine's GEMM at TP=1 does.
        return self._fp8(input, weight, bias, out_dtype=torch.float32 if self.tp_group.size() > 1 else None)

    def forward(self, input_):
        if input_.is_cuda or self.tp_group.size() == 1:
            output, bias = super().forward(input_)
            return output.to(input_.dtype), bias
        part = self._in_turn(input_)
        total = _WithValue.apply(part, _from_last(part.detach(), self.tp_group))
        if self.sequence_parallel:
            total = scatter_to_sequence_parallel_region(total, group=self.tp_group)
        return total.to(input_.dtype), self.bias

    def _in_turn(self, x: Tensor) -> Tensor:
        """FP32 accumulators `[T, 1, out]` over the K-blocks of the ranks up to this one, one rank after the other."""
        ranks, mine = dist.get_process_group_ranks(self.tp_group), self.tp_group.rank()
        initial = None
        if mine > 0:
            initial = torch.empty(*x.shape[:-1], self.output_size, dtype=torch.float32)
            dist.recv(initial, src=ranks[mine - 1], group=self.tp_group)
        part = self._fp8(x, self.weight, None, out_dtype=torch.float32, initial=initial)
        if mine + 1 < len(ranks):
            dist.send(part.detach(), dst=ranks[mine + 1], group=self.tp_group)
        return part


def _from_last(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The last rank's tensor, on every rank of `group`."""
    value = part.clone()
    dist.broadcast(value, src=dist.get_process_group_ranks(group)[-1], group=group)
    return value


class _WithValue(torch.autograd.Function):
    """`value`, with the gradient passed on to `part`: each rank's part enters the sum once."""

    @staticmethod
    def forward(ctx, part: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class RMSNorm(nn.Module):
    """Norm with the engine's own rounding: FP32 statistics, BF16 before the weight. Input and output `[..., H]`."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees only its part of the sequence; Megatron sums the gradients of marked parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SiluMul(nn.Module):
    """`[T, 1, 2F_p]` (gate, then up) -> `[T, 1, F_p]`."""

    def __init__(self, config):
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)


class EngineAttention(nn.Module):
    """Rope and causal attention over packed sequences, by the operations that the engine runs.

    Megatron's own rope rounds differently (BF16 products), so the model is built without one and q and k arrive here
    unrotated. Positions follow from `packed_seq_params.cu_seqlens_q`.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__()
        self.config = config
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_) -> Tensor:
        """query `[T, N_p, D]`, key and value `[T, KV_p, D]`, BF16 -> `[T, N_p * D]`."""
        packed: Any = packed_seq_params
        q, k = self.rotated(query, key, packed)
        if query.is_cuda:
            from jetrl_megatron.megatron import gpu

            return gpu.attention(q, k, value, packed.cu_seqlens_q, self.scale, packed.max_seqlen_q)
        return attention(q, k, value.contiguous(), packed.cu_seqlens_q, self.scale)

    def rotated(self, query: Tensor, key: Tensor, packed: Any) -> tuple[Tensor, Tensor]:
        """Query and key at their positions."""
        if query.is_cuda:
            from jetrl_megatron.megatron import gpu

            return gpu.rope(query, key, packed.positions, self.config.rope)
        return rope(query, key, packed.positions, self.config.rope)
