"""Engine layers other than linears that both sides must share, put in through vLLM's registries of replacements.

`CustomOp.register_oot` and `PluggableLayer.register_oot` replace a class where models instantiate it. In a process that
also builds a model without `quantization="jetrl"`, that model's layers fall through to vLLM's own code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding
from vllm.platforms import current_platform

from jetrl_kernels.rms_norm import add_rms_norm, rms_norm
from jetrl_kernels.swiglu import silu_mul
from jetrl_megatron.rollout.gpu import ops  # noqa: F401  registers torch.ops.jetrl
from jetrl_megatron.rollout.plugin import NAME


def _asked_for() -> bool:
    model = get_current_vllm_config().model_config
    return model is not None and model.quantization == NAME


class JetrlRMSNorm(RMSNorm):
    """Trainer's norm. The residual sum is rounded to BF16 before it is normalized, as separate layers do it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if _asked_for():
            if self.variance_size_override is not None or not self.has_weight:
                raise NotImplementedError("RMSNorm over a part of the row, or without a weight, is not supported")
            self._forward_method = self._shared_cuda if current_platform.is_cuda() else self._shared

    def _shared_cuda(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return torch.ops.jetrl.rms_norm(x, self.weight, self.variance_epsilon)
        return torch.ops.jetrl.add_rms_norm(x, residual, self.weight, self.variance_epsilon)

    def _shared(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)
        return add_rms_norm(x, residual, self.weight, self.variance_epsilon)


class JetrlSiluAndMul(SiluAndMul):
    """Trainer's SwiGLU."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if _asked_for():
            self._forward_method = self._shared_cuda if current_platform.is_cuda() else silu_mul

    def _shared_cuda(self, x: Tensor) -> Tensor:
        return torch.ops.jetrl.silu_mul(x)


class _OutOfPlaceRope:
    """vLLM's kernel behind an operator without side effects, which our compiler pass can join with the norms."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        whole_head = self.rotary_dim == self.head_size and self.is_neox_style  # type: ignore[attr-defined]
        if _asked_for() and current_platform.is_cuda() and whole_head:
            self._forward_method = self._shared_cuda

    def _shared_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None):
        if key is None:
            return self.forward_cuda(positions, query, key)  # type: ignore[attr-defined]
        table = self._match_cos_sin_cache_dtype(query)  # type: ignore[attr-defined]
        return torch.ops.jetrl.rope(positions, query, key, table)


class JetrlRotaryEmbedding(_OutOfPlaceRope, RotaryEmbedding):
    pass


class JetrlLlama3RotaryEmbedding(_OutOfPlaceRope, Llama3RotaryEmbedding):
    pass


class JetrlRowParallelLinear(RowParallelLinear):
    """Adds the FP32 partial sums of all ranks and rounds once: equal to one rank's result up to FP32 addition order."""

    def forward(self, input_: Tensor):
        if self.tp_size == 1 or not self.reduce_results or not self.input_is_parallel or self.return_bias is False:
            return super().forward(input_)
        bias = None if (self.tp_rank > 0 or self.skip_bias_add) else self.bias
        part = self.quant_method.apply(self, input_, bias)  # type: ignore[attr-defined]
        output = tensor_model_parallel_all_reduce(part).to(torch.bfloat16)
        return output, self.bias if self.skip_bias_add else None


def register() -> None:
    """Put the replacements into vLLM's registries. Safe to call again."""
    if "RMSNorm" not in op_registry_oot:
        CustomOp.register_oot(JetrlRMSNorm, name="RMSNorm")
        CustomOp.register_oot(JetrlSiluAndMul, name="SiluAndMul")
        CustomOp.register_oot(JetrlRotaryEmbedding, name="RotaryEmbedding")
        CustomOp.register_oot(JetrlLlama3RotaryEmbedding, name="Llama3RotaryEmbedding")
        PluggableLayer.register_oot(JetrlRowParallelLinear, name="RowParallelLinear")
