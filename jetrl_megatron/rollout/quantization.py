"""vLLM's quantization config `jetrl`: which layers of the engine are FP8, and what each layer computes.

FP8 linears call `jetrl_kernels.fp8_linear`, the function that the trainer's layers call: W8A8, activations quantized in
the layer, GEMM chosen by (N, K) alone. Everything that stays BF16 gets a method of ours too, because vLLM's CPU backend
packs unquantized weights when loading: packed, a parameter can neither be written in place nor digested.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from jetrl_kernels.formats import BLOCK
from jetrl_kernels.fp8_linear import fp8_linear
from jetrl_kernels.fused_logprob.chunk import head_logits
from jetrl_kernels.quant_weight import QuantizedWeight
from jetrl_megatron.rollout.gpu import ops  # noqa: F401  registers torch.ops.jetrl
from jetrl_megatron.rollout.plugin import NAME


def quantization_dict(modules: Iterable[str], scales: str) -> dict[str, Any]:
    """The `quantization_config` that an engine is started with (through `hf_overrides`).

    Args:
        modules: engine modules whose weight is FP8, e.g. `model.layers.0.self_attn.qkv_proj`; none in mode `bf16`.
        scales: scale policy, `pow2` or `fp32`.
    """
    return {
        "quant_method": NAME,
        "scales": scales,
        "modules": sorted(modules),
        "weight_block_size": [BLOCK, BLOCK],
    }


class JetrlConfig(QuantizationConfig):
    """Which modules are FP8 and under which scale policy; made by vLLM from `quantization_dict`."""

    def __init__(self, scales: str, modules: Iterable[str]):
        super().__init__()
        self.scales = scales
        self.modules = frozenset(modules)
        self.weight_block_size = [BLOCK, BLOCK]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> JetrlConfig:
        return cls(config["scales"], config["modules"])

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return Fp8Method(self.scales) if prefix in self.modules else PlainMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return EmbeddingMethod()
        if isinstance(layer, RoutedExperts):
            raise NotImplementedError(f"{prefix}: the engine does not run mixture-of-experts layers in this mode yet")
        return None


def _weight(rows: int, cols: int, dtype: torch.dtype, loader: Any) -> ModelWeightParameter:
    data = torch.empty(rows, cols, dtype=dtype)
    return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)


def _plain_parameters(layer: nn.Module) -> None:
    """On a GPU, turn vLLM's parameter classes into `nn.Parameter` over the same memory: torch.compile asks for that."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if parameter.is_cuda and type(parameter) is not nn.Parameter:
            setattr(layer, name, nn.Parameter(parameter.data, requires_grad=False))


@register_weight_loader_v2_supported_method
class Fp8Method(LinearMethodBase):
    """`weight` E4M3 `[out, in]` and `weight_scale_inv` FP32 `[ceil(out/128), ceil(in/128)]`, consumed as they are."""

    def __init__(self, scales: str):
        self.scales = scales

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, **extra
    ):
        if params_dtype != torch.bfloat16:
            raise ValueError(f"{layer.prefix}: FP8 layers need dtype bfloat16, not {params_dtype}")
        if len(output_partition_sizes) > 1 and any(size % BLOCK for size in output_partition_sizes):
            raise ValueError(f"{layer.prefix}: parts of {output_partition_sizes} rows break {BLOCK}x{BLOCK} tiles")
        loader = extra["weight_loader"]
        out = sum(output_partition_sizes)
        # vLLM's loader asks the layer for this when it cuts the scales of fused layers.
        layer.weight_block_size = [BLOCK, BLOCK]
        layer.register_parameter("weight", _weight(out, input_size_per_partition, torch.float8_e4m3fn, loader))
        # NaN until a checkpoint or a refit writes them: a BF16 folder must not pass for an FP8 one.
        scale = torch.full((-(-out // BLOCK), -(-input_size_per_partition // BLOCK)), float("nan"), dtype=torch.float32)
        layer.register_parameter(
            "weight_scale_inv",
            BlockQuantScaleParameter(data=scale, input_dim=1, output_dim=0, weight_loader=loader),
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not bool(layer.weight_scale_inv.isfinite().all()):
            raise ValueError(f"{layer.prefix}.weight_scale_inv was not in the checkpoint: not an FP8 model folder?")
        _plain_parameters(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # Partial sums of a row-parallel layer leave in FP32 and are rounded after the reduction (layers.py).
        partial_sum = isinstance(layer, RowParallelLinear) and layer.tp_size > 1 and layer.reduce_results
        if x.is_cuda:
            y = torch.ops.jetrl.fp8_linear(x, layer.weight, layer.weight_scale_inv, self.scales, partial_sum)
            return y if bias is None else y + bias.to(y.dtype)
        return fp8_linear(
            x,
            None,
            QuantizedWeight(layer.weight.data, layer.weight_scale_inv.data),
            bias,
            policy=self.scales,
            out_dtype=torch.float32 if partial_sum else None,
        )


@register_weight_loader_v2_supported_method
class PlainMethod(LinearMethodBase):
    """BF16 linear, `F.linear` on the parameter itself."""

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, **extra
    ):
        loader = extra["weight_loader"]
        weight = _weight(sum(output_partition_sizes), input_size_per_partition, params_dtype, loader)
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        _plain_parameters(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class EmbeddingMethod(QuantizeMethodBase):
    """Embedding and lm_head (the same parameter in a tied model), BF16 `[vocab, hidden]`; logits in FP32."""

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra,
    ):
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        weight = nn.Parameter(data, requires_grad=False)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra})
        layer.register_parameter("weight", weight)

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        return F.embedding(input_, layer.weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = head_logits(x, layer.weight)
        return logits if bias is None else logits + bias.float()
