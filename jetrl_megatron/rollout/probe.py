"""Worker methods that look inside a running engine: which operation is the first to differ from the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from jetrl_megatron.activations import Recorder, at
from jetrl_megatron.rollout.weight_transfer import WorkerExtension


class ProbeExtension(WorkerExtension):
    """Digests every operation's result in the prefill of one sequence (`jetrl_megatron.activations`)."""

    def jetrl_record(self, length: int) -> None:
        """Watch from now on: the next forward pass must be the prefill of a sequence of `length` tokens, in one piece.

        Compiled code runs no hooks, so until `jetrl_recorded` the model runs uncompiled.
        """
        engine = self.weight_transfer_engine
        self._probe = _Probe(engine.model, engine.parallel_config.rank, length)

    def jetrl_recorded(self) -> dict[str, int]:
        """Stop watching; digests of this worker's shards by operation. The head is asked again, for all tokens."""
        return self._probe.finish()


class _Probe:
    def __init__(self, causal: Any, rank: int, length: int):
        self.causal, self.rank, self.seen = causal, rank, Recorder(0, length)
        self.compiled = [m for m in causal.modules() if getattr(m, "do_not_compile", True) is False]
        for module in self.compiled:
            module.do_not_compile = True
        self.hooks: list[Any] = []
        model, last = causal.model, len(causal.model.layers) - 1
        self._watch(model.embed_tokens, lambda x: self._whole("embed_tokens", x))
        for number, layer in enumerate(model.layers):
            self._watch_layer(number, layer)
        self._watch(model.norm, lambda out: self._normed("norm", at(last, "residual sum after mlp"), out))

    def finish(self) -> dict[str, int]:
        for hook in self.hooks:
            hook.remove()
        for module in self.compiled:
            module.do_not_compile = False
        self.seen.add_logits(self.final, self.causal.compute_logits)
        return self.seen.found()

    def _watch(self, module: Any, see: Callable[[Any], None]) -> None:
        self.hooks.append(module.register_forward_hook(lambda _, inputs, output: see(output)))

    def _watch_layer(self, n: int, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        before = at(n - 1, "residual sum after mlp")
        self._watch(layer.input_layernorm, lambda out: self._normed(at(n, "input_layernorm"), before, out))
        widths = (attention.q_size, attention.kv_size, attention.kv_size)
        projections = [at(n, f"self_attn.{x}_proj") for x in "qkv"]
        self._watch(attention.qkv_proj, lambda out: self._shards(projections, out[0].split(widths, -1)))
        if hasattr(attention, "q_norm"):
            self._watch(attention.q_norm, lambda out: self._shards([at(n, "self_attn.q_norm")], [out]))
            self._watch(attention.k_norm, lambda out: self._shards([at(n, "self_attn.k_norm")], [out]))
        # One rotary module serves all layers; what it returned arrives at the layer's own attention.
        ropes = [at(n, f"self_attn.rope of {x}") for x in "qk"]
        self.hooks.append(attention.attn.register_forward_pre_hook(lambda _, inputs: self._shards(ropes, inputs[:2])))
        self._watch(attention.attn, lambda out: self._shards([at(n, "self_attn.attention")], [out]))
        self._watch(attention.o_proj, lambda out: self._whole(at(n, "self_attn.o_proj"), out[0]))
        norm, total = at(n, "post_attention_layernorm"), at(n, "residual sum after self_attn")
        self._watch(layer.post_attention_layernorm, lambda out: self._normed(norm, total, out))
        halves = [at(n, "mlp.gate_proj"), at(n, "mlp.up_proj")]
        self._watch(mlp.gate_up_proj, lambda out: self._shards(halves, out[0].chunk(2, -1)))
        self._watch(mlp.act_fn, lambda out: self._shards([at(n, "mlp.act_fn")], [out]))
        self._watch(mlp.down_proj, lambda out: self._whole(at(n, "mlp.down_proj"), out[0]))

    def _normed(self, name: str, total_name: str, output: Tensor | tuple[Tensor, Tensor]) -> None:
        """A norm's result and, but for the first norm, the residual sum that it normalized."""
        if isinstance(output, tuple):
            output, total = output
            self._whole(total_name, total)
        self._whole(name, output)
        if name == "norm":
            self.final = self.seen.rows(output)

    def _whole(self, name: str, x: Tensor) -> None:
        """A result that every worker has: the first one's counts."""
        if self.rank == 0:
            self.seen.add(name, x)

    def _shards(self, names: Sequence[str], parts: Sequence[Tensor]) -> None:
        """Results whose columns (or heads) are cut over the workers."""
        for name, x in zip(names, parts):
            self.seen.add(name, x, col0=self.rank * x.flatten(1).shape[1])
