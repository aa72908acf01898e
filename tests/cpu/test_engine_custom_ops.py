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
    "rope": lambda q: (torch.arange(T), _x(64), _x(32, 1), _x(16, 2)),
    "qk_norm_rope": lambda q: (_x(128), torch.arange(T), _x(16, 2), 4, 2, torch.ones(16), torch.ones(16), 1e-6),
    "norm_fp8_linear_first": lambda q: (_x(H), None, torch.ones(H).bfloat16(), 1e-6, q.codes, q.scale, "pow2"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_compiler_is_told_the_right_shapes(case: str) -> None:
    if case == "rope":
        import vllm._custom_ops  # noqa: F401  registers torch.ops._C
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


@pytest.mark.slow
@pytest.mark.parametrize("norm", [True, False])
def test_head_norms_and_rope_read_the_projection(norm: bool) -> None:
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C
    from torch.fx.experimental.proxy_tensor import make_fx

    from jetrl_megatron.rollout.gpu.fusion import FuseProducers

    heads, kv_heads, dim = 4, 2, 32
    weight = (1 + 0.1 * torch.randn(dim, generator=torch.Generator().manual_seed(3))).bfloat16()
    angles = torch.arange(7)[:, None] * 100.0 ** (-torch.arange(0, dim, 2) / dim)
    table = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()

    def layer(qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, weight: torch.Tensor):
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        if norm:
            q, k = (
                torch.ops.jetrl.rms_norm(x.view(*x.shape[:-1], -1, dim), weight, 1e-6).view(x.shape) for x in (q, k)
            )
        return (*torch.ops.jetrl.rope(positions, q, k, table), v)

    args = _x((heads + 2 * kv_heads) * dim), torch.tensor([0, 6, 3, 1, 5]), table, weight
    traced = make_fx(layer, tracing_mode="fake")(*args)
    before = traced(*args)
    fuse = FuseProducers()
    fuse(traced.graph)
    traced.graph.lint()
    traced.recompile()
    assert fuse.fused == 1
    assert not {torch.ops.jetrl.rope.default, torch.ops.jetrl.rms_norm.default} & {n.target for n in traced.graph.nodes}
    for old, new in zip(before, traced(*args)):
        assert torch.equal(old, new)


def test_a_machine_without_gpu_is_refused_by_name() -> None:
    from jetrl_megatron.config import Config
    from jetrl_megatron.megatron.gpu.requirements import problems

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert problems(Config()) == ["train.device: torch sees no CUDA device on this machine"]
