"""The trainer's side of `jetrl_megatron.activations`: hooks on this rank's layers during one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from jetrl_kernels.fused_logprob.chunk import head_logits
from jetrl_megatron.activations import Recorder, at
from jetrl_megatron.megatron.trainer import Trainer


@contextmanager
def watched(trainer: Trainer, start: int, length: int) -> Iterator[Recorder]:
    """Note the results of every operation for rows start ... start + length of the next forward pass.

    Separate layers are watched: run it without gradients, where no layers are fused.
    """
    probe = _Probe(trainer, Recorder(start, length))
    try:
        yield probe.seen
    finally:
        for hook in probe.hooks:
            hook.remove()


class _Probe:
    def __init__(self, trainer: Trainer, seen: Recorder):
        self.seen, self.spec, core = seen, trainer.spec, trainer.core
        self.rank = parallel_state.get_tensor_model_parallel_rank()
        self.rows_cut = core.config.sequence_parallel
        self.hooks: list[Any] = []
        if core.pre_process:
            self._watch(core.embedding, lambda x: self._whole("embed_tokens", x))
        for layer in core.decoder.layers:
            self._watch_layer(layer.layer_number - 1, layer)
        if core.post_process:
            weight = core.shared_embedding_or_output_weight() if self.spec.tied else core.output_layer.weight
            self._before(core.decoder.final_layernorm, lambda x: self._residual(self.spec.num_layers, x))
            self._watch(core.decoder.final_layernorm, lambda x: self._head(x, weight))

    def _watch(self, module: Any, see: Any) -> None:
        self.hooks.append(
            module.register_forward_hook(lambda _, i, out: see(out[0] if isinstance(out, tuple) else out))
        )

    def _before(self, module: Any, see: Any) -> None:
        self.hooks.append(module.register_forward_pre_hook(lambda _, inputs: see(inputs[0])))

    def _watch_layer(self, n: int, layer: Any) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        self._before(layer.input_layernorm, lambda x: self._residual(n, x))
        self._watch(layer.input_layernorm, lambda x: self._whole(at(n, "input_layernorm"), x))
        self._watch(attention.linear_qkv, lambda x: self._qkv(n, x))
        if self.spec.qk_norm:
            self._watch(attention.q_layernorm, lambda x: self._shard(at(n, "self_attn.q_norm"), x))
            self._watch(attention.k_layernorm, lambda x: self._shard(at(n, "self_attn.k_norm"), x))
        self.hooks.append(
            attention.core_attention.register_forward_hook(
                lambda module, inputs, kwargs, out: self._attention(n, module, inputs, kwargs, out), with_kwargs=True
            )
        )
        self._watch(attention.linear_proj, lambda x: self._whole(at(n, "self_attn.o_proj"), x))
        self._before(layer.pre_mlp_layernorm, lambda x: self._whole(at(n, "residual sum after self_attn"), x))
        self._watch(layer.pre_mlp_layernorm, lambda x: self._whole(at(n, "post_attention_layernorm"), x))
        self._watch(mlp.linear_fc1, lambda x: self._gate_up(n, x))
        self._watch(mlp.activation_func, lambda x: self._shard(at(n, "mlp.act_fn"), x))
        self._watch(mlp.linear_fc2, lambda x: self._whole(at(n, "mlp.down_proj"), x))

    def _residual(self, layer: int, x: Tensor) -> None:
        if layer:
            self._whole(at(layer - 1, "residual sum after mlp"), x)

    def _whole(self, name: str, x: Tensor) -> None:
        """A result that every tensor-parallel rank has, or whose rows they share under sequence parallel."""
        if self.rows_cut:
            self.seen.add(name, x, first_row=self.rank * x.shape[0])
        elif self.rank == 0:
            self.seen.add(name, x)

    def _shard(self, name: str, x: Tensor) -> None:
        """A result whose columns (or heads) are cut over tensor-parallel ranks."""
        self.seen.add(name, x, col0=self.rank * x.flatten(1).shape[1])

    def _qkv(self, n: int, x: Tensor) -> None:
        """`[T, 1, groups * (N/G + 2) * D]`, each group's query heads before its key and its value."""
        heads = self.spec.num_heads // self.spec.num_kv_heads
        by_group = x.view(x.shape[0], -1, heads + 2, self.spec.head_dim)
        for name, part in zip("qkv", by_group.split([heads, 1, 1], dim=2)):
            self._shard(at(n, f"self_attn.{name}_proj"), part)

    def _gate_up(self, n: int, x: Tensor) -> None:
        for name, part in zip(("gate", "up"), x.chunk(2, -1)):
            self._shard(at(n, f"mlp.{name}_proj"), part)

    def _attention(self, n: int, module: Any, inputs: Any, kwargs: Any, out: Tensor) -> None:
        for name, x in zip("qk", module.rotated(*inputs[:2], kwargs["packed_seq_params"])):
            self._shard(at(n, f"self_attn.rope of {name}"), x)
        self._shard(at(n, "self_attn.attention"), out)

    def _head(self, normed: Tensor, weight: Tensor) -> None:
        self._whole("norm", normed)
        if self.rows_cut:
            group = parallel_state.get_tensor_model_parallel_group()
            normed = gather_from_sequence_parallel_region(normed, group=group)
        start = self.rank * weight.shape[0]
        head = weight.detach()[: self.spec.vocab_size - start]
        self.seen.add_logits(self.seen.rows(normed.flatten(1)), lambda x: head_logits(x, head), col0=start)
