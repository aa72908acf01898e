"""The engine's torch operators: their shapes for the compiler, and the pass that fuses producers into linears."""

from __future__ import annotations

import pytest
import torch
from torch.fx import symbolic_trace

from jetrl_kernels.quant_weight import QuantizedWeight, quant_weight
from jetrl_megatron.rollout.gpu import ops

T, H, N = 5, 256, 384


def _weight(rows: int, cols: int) -> QuantizedWeight:
    return quant_weight(torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).bfloat16())


def _x(cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(T, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()


CASES = {
    "fp8_linear": lambda q: (_x(H), q.codes, q.scale, "pow2", False),
    "fp8_linear_fp32": lambda q: (_x(H), q.codes, q.scale, "fp32", True),
    "rms_norm": lambda q: (_x(H), torch.ones(H).bfloat16(), 1e-6),
    "add_rms_norm": lambda q: (_x(H), _x(H, 1), torch.ones(H).bfloat16(), 1e-6),
    "silu_mul": lambda q: (_x(2 * H),),
    "silu_fp8_linear": lambda q: (_x(2 * H), q.codes, q.scale, "pow2", False),
    "norm_fp8_linear": lambda q: (_x(H), _x(H, 1), torch.ones(H).bfloat16(), 1e-6, q.codes, q.scale, "pow2"),
    "norm_fp8_linear_first": lambda q: (_x(H), None, torch.ones(H).bfloat16(), 1e-6, q.codes, q.scale, "pow2"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_compiler_is_told_the_right_shapes(case: str) -> None:
    operator = getattr(ops, case.removesuffix("_fp32").removesuffix("_first"))
    torch.library.opcheck(operator, CASES[case](_weight(N, H)), test_utils="test_faketensor")


@pytest.mark.slow
def test_fusion_keeps_the_bits() -> None:
    from jetrl_megatron.rollout.gpu.fusion import FuseProducers

    qkv, up, down = _weight(N, H), _weight(2 * N, H), _weight(H, N)
    weight = (1 + 0.1 * torch.randn(H, generator=torch.Generator().manual_seed(3))).bfloat16()

    def layer(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        j = torch.ops.jetrl
        first = j.fp8_linear.default(j.rms_norm.default(x, weight, 1e-6), qkv.codes, qkv.scale, "pow2", False)
        normed, total = j.add_rms_norm.default(x, residual, weight, 1e-6)
        gate_up = j.fp8_linear.default(normed, up.codes, up.scale, "pow2", False)
        out = j.fp8_linear.default(j.silu_mul.default(gate_up), down.codes, down.scale, "pow2", False)
        return first, out, total

    traced = symbolic_trace(layer)
    args = _x(H, 5), _x(H, 6)
    before = traced(*args)
    fuse = FuseProducers()
    fuse(traced.graph)
    traced.graph.lint()
    traced.recompile()
    assert fuse.fused == 3
    targets = {n.target for n in traced.graph.nodes if n.op == "call_function"}
    assert torch.ops.jetrl.fp8_linear.default not in targets and torch.ops.jetrl.silu_mul.default not in targets
    for old, new in zip(before, traced(*args)):
        assert torch.equal(old, new)


@pytest.mark.slow
def test_fusion_leaves_a_norm_that_others_read() -> None:
    from jetrl_megatron.rollout.gpu.fusion import FuseProducers

    q, weight = _weight(N, H), torch.ones(H).bfloat16()

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = torch.ops.jetrl.rms_norm.default(x, weight, 1e-6)
        return torch.ops.jetrl.fp8_linear.default(normed, q.codes, q.scale, "pow2", False), normed

    traced = symbolic_trace(layer)
    fuse = FuseProducers()
    fuse(traced.graph)
    assert fuse.fused == 0


def test_a_machine_without_gpu_is_refused_by_name() -> None:
    from jetrl_megatron.config import Config
    from jetrl_megatron.megatron.gpu.requirements import problems

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert problems(Config()) == ["train.device: torch sees no CUDA device on this machine"]
