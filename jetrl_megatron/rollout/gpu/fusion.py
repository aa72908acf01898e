"""Inductor pass that joins operators of ours, with the same bits.

A norm or SwiGLU and the FP8 linear behind it become one operator, and so do the head-wise norms of queries and keys and
the rotary embedding.

vLLM's own norm and activation fusions know only its quantizers (which have no power-of-two option) and stay off.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node
from vllm.compilation.passes.inductor_pass import InductorPass

from jetrl_megatron.rollout.gpu import ops  # noqa: F401  registers the operators


class FuseProducers(InductorPass):
    """Runs on every compiled piece of the model; `fused` counts what it replaced."""

    def __init__(self) -> None:
        self.fused = 0

    def __call__(self, graph: Graph) -> None:
        import torch

        jetrl = torch.ops.jetrl
        for linear in [n for n in graph.nodes if n.target == jetrl.fp8_linear.default]:
            x, codes, scale, policy, fp32_out = linear.args
            if not isinstance(x, Node) or len(x.users) != 1:
                continue
            # Weights are inputs of the piece (or attributes of it), so they are there wherever the norm is.
            if any(weight.op not in ("placeholder", "get_attr") for weight in (codes, scale)):
                continue
            with graph.inserting_before(linear):
                if x.target == jetrl.silu_mul.default:
                    new = graph.call_function(
                        jetrl.silu_fp8_linear.default, (x.args[0], codes, scale, policy, fp32_out)
                    )
                elif x.target == jetrl.rms_norm.default and not fp32_out:
                    source, weight, eps = x.args
                    pair = graph.call_function(
                        jetrl.norm_fp8_linear.default, (source, None, weight, eps, codes, scale, policy)
                    )
                    new = graph.call_function(operator.getitem, (pair, 0))
                elif _is_first_of(x, jetrl.add_rms_norm.default) and not fp32_out:
                    new = _fuse_add_norm(graph, x, linear, jetrl.norm_fp8_linear.default)
                else:
                    continue
            _carry_meta(linear, new)
            linear.replace_all_uses_with(new)
            graph.erase_node(linear)
            if not x.users:
                graph.erase_node(x)
            self.fused += 1
        for rope in [n for n in graph.nodes if n.target == jetrl.rope.default]:
            self.fused += _fuse_qk(graph, rope)
        graph.eliminate_dead_code()


def _fuse_qk(graph: Graph, rope: Node) -> bool:
    """Let the rotation (and the norms before it) read the projection's result itself."""
    import torch

    jetrl, split = torch.ops.jetrl, torch.ops.aten.split_with_sizes.default
    positions, *inputs, table = rope.args
    norms, parts = [], []
    for node in map(_without_views, inputs):
        if node.target == jetrl.rms_norm.default:
            norms.append(node.args[1:])
            node = _without_views(node.args[0])
        parts.append(node)
    if any(part.target != operator.getitem or part.args[0].target != split for part in parts):
        return False
    splits = [part.args[0] for part in parts]
    (qkv, sizes, *_), (other, *_) = (s.args for s in splits)
    eps = {norm[1] for norm in norms}
    if qkv is not other or [part.args[1] for part in parts] != [0, 1] or len(norms) not in (0, 2) or len(eps) > 1:
        return False
    dim = table.meta["val"].shape[-1]  # type: ignore[union-attr]
    weights = [norm[0] for norm in norms] or [None, None]
    with graph.inserting_before(rope):
        new = graph.call_function(
            jetrl.qk_norm_rope.default,
            (qkv, positions, table, sizes[0] // dim, sizes[1] // dim, *weights, eps.pop() if eps else 0.0),
        )
    _carry_meta(rope, new)
    rope.replace_all_uses_with(new)
    graph.erase_node(rope)
    return True


def _without_views(node: Node) -> Node:
    import torch

    aten = torch.ops.aten
    while node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_first_of(node: Node, target: object) -> bool:
    """Whether `node` is output 0 of a call of `target`."""
    if node.target != operator.getitem or node.args[1] != 0:
        return False
    return isinstance(node.args[0], Node) and node.args[0].target == target


def _fuse_add_norm(graph: Graph, normed: Node, linear: Node, target) -> Node:
    """Replace `add_rms_norm` (whose output 0 only `linear` reads): the sum now comes from the fused operator."""
    add = normed.args[0]
    assert isinstance(add, Node)
    x, residual, weight, eps = add.args
    _, codes, scale, policy, _ = linear.args
    # The sum may be read before the linear, so the fused call goes where the norm was.
    for weight_node in (codes, scale):
        if weight_node.op == "get_attr":
            add.prepend(weight_node)
    with graph.inserting_before(add):
        pair = graph.call_function(target, (x, residual, weight, eps, codes, scale, policy))
        new = graph.call_function(operator.getitem, (pair, 0))
        total = graph.call_function(operator.getitem, (pair, 1))
    for user in list(add.users):
        if user.args[1] == 1:
            _carry_meta(user, total)
            user.replace_all_uses_with(total)
            graph.erase_node(user)
    return new


def _carry_meta(old: Node, new: Node) -> None:
    new.meta.update({k: v for k, v in old.meta.items() if k in ("val", "tensor_meta")})
