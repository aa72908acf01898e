"""Transformer Engine's linear layers in our spec (`precision.linear_backend=te`).

The weights stay BF16 parameters; their FP8 bytes are made by TE's own quantizer once per optimizer step, in the cache
that TE's next forward reads (`_fp8_workspaces["weight"]`), and those very bytes are what a refit ships. TE would
otherwise make them inside the first forward after a step, too late for the engine.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from torch import Tensor
from transformer_engine.common.recipe import Float8BlockScaling, Format, QParams
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

from jetrl_kernels.formats import blocks
from jetrl_kernels.quant_weight import QuantizedWeight
from jetrl_megatron.config import PrecisionConfig
from jetrl_megatron.megatron.layers import Fp8Weight


def recipe(policy: str) -> Float8BlockScaling:
    """E4M3 forward and backward, 1x128 and 128x128 blocks, scales by `policy`, no floor on amax."""
    params = QParams(power_2_scale=policy == "pow2", amax_epsilon=0.0)
    built = Float8BlockScaling(fp8_format=Format.E4M3)
    built.fp8_quant_fwd_inp = built.fp8_quant_fwd_weight = built.fp8_quant_bwd_grad = params
    return built


class _FusedAccumulation:
    """WGrad adds to FP32 `main_grad` in its GEMM. Megatron's flag for it would also reach its own linear layers, which
    need apex for that, so it is set here."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fuse_wgrad_accumulation = True
        # TE must neither requantize the weight nor overwrite `main_grad` in the first micro-batch.
        self.is_first_microbatch = False
        self.disable_parameter_transpose_cache = False


class _Fp8(Fp8Weight):
    weight: Tensor
    precision: PrecisionConfig

    @torch.no_grad()
    def quantize(self, weight: Tensor | None = None) -> None:
        """Let TE quantize the BF16 weight into its own cache, row-wise and column-wise, in place after the first."""
        source = (self.weight if weight is None else weight).detach()
        cache = self._fp8_workspaces  # type: ignore[attr-defined]
        if "weight" not in cache:
            quantizer = Float8BlockQuantizer(
                fp8_dtype=tex.DType.kFloat8E4M3,
                rowwise=True,
                columnwise=True,
                amax_epsilon=0.0,
                force_pow_2_scales=self.precision.scales == "pow2",
                block_scaling_dim=2,
            )
            cache["weight"] = quantizer.quantize(source)
        else:
            cache["weight"].quantize_(source)
        held = cache["weight"]
        # TE pads the last dimension of its scales to a multiple of 4.
        scale = held._rowwise_scale_inv[:, : blocks(self.weight.shape[1])]
        self.qweight = QuantizedWeight(held._rowwise_data.view(torch.float8_e4m3fn), scale)

    def forward(self, x: Tensor):
        if self.qweight is None:
            raise RuntimeError("FP8 linear used before its weight was quantized")
        self.is_first_microbatch = False
        with te.autocast(enabled=True, recipe=recipe(self.precision.scales)):
            return super().forward(x)  # type: ignore[misc]


class TeColumnParallelLinear(_FusedAccumulation, TEColumnParallelLinear):
    """BF16 `Y_p = X W_p^T`, gradient accumulated in the GEMM."""


class TeRowParallelLinear(_FusedAccumulation, TERowParallelLinear):
    """BF16 `Y = sum_p X_p W_p^T`, gradient accumulated in the GEMM."""


class TeFp8ColumnParallelLinear(_Fp8, TeColumnParallelLinear):
    """FP8 `Y_p = X W_p^T` by TE."""


class TeFp8RowParallelLinear(_Fp8, TeRowParallelLinear):
    """FP8 `Y = sum_p X_p W_p^T` by TE; parts are rounded to BF16 before the reduction."""
