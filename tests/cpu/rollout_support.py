"""What the rollout tests share: a small model, a sender of its weights, and the trainer's forward pass in plain torch.

Nothing here imports vLLM: only the engine's own process does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_conversion.layout import Layout, Piece, pieces
from jetrl_conversion.model_spec import ModelSpec, load_model_spec
from jetrl_kernels.fp8_linear import fp8_linear
from jetrl_kernels.fused_logprob.chunk import head_logits
from jetrl_kernels.quant_weight import quant_weight
from jetrl_kernels.rms_norm import rms_norm
from jetrl_kernels.swiglu import silu_mul
from jetrl_megatron.engine_ops import Rope, attention, rope
from jetrl_megatron.refit.message import SCALE_SUFFIX, RefitMessage, TensorSlot, plan_slots, segment_bytes
from jetrl_megatron.refit.shm import Segment

VLLM = Layout("vllm")


def write_model(folder: Path, **changes: object) -> ModelSpec:
    """A Qwen3 of 2 layers with 2 query heads per KV head; only config.json, and a generation_config.json that must not
    be obeyed."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 384,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps(
            {
                "top_k": 20,
                "top_p": 0.8,
                "repetition_penalty": 1.1,
                "temperature": 0.6,
                "do_sample": True,
                "eos_token_id": list(range(100, 200)),
            }
        )
    )
    return load_model_spec(folder)


def random_weights(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """BF16 weights by Hugging Face name, large enough that log-probs of different tokens differ by nats."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, info in spec.tensors().items():
        noise = torch.randn(info.shape, generator=generator)
        weights[name] = (1 + 0.1 * noise if len(info.shape) == 1 else 0.09 * noise).bfloat16()
    return weights


def quantized_names(spec: ModelSpec) -> set[str]:
    return {name for name, info in spec.tensors().items() if info.quantized}


class Sender:
    """Stands in for the trainer's side: writes weights into a segment and makes the messages."""

    def __init__(self, spec: ModelSpec, quantized: Collection[str], layout: Layout = VLLM):
        self.spec, self.quantized, self.layout = spec, quantized, layout
        self.segments = [
            Segment.create(segment_bytes(plan_slots(spec, layout, rank, quantized)), f"test{rank}")
            for rank in range(layout.world)
        ]

    @property
    def segment(self) -> Segment:
        return self.segments[0]

    def close(self) -> None:
        for segment in self.segments:
            segment.unlink()

    def messages(self, version: int, weights: Mapping[str, Tensor], chunks: int = 1):
        """One message for each chunk; the segment holds a chunk's bytes while its message is out."""
        slots = tuple(plan_slots(self.spec, self.layout, r, self.quantized, chunks) for r in range(self.layout.world))
        for chunk in range(chunks):
            for rank, held in enumerate(slots):
                self._write(rank, [slot for slot in held if slot.chunk == chunk], weights)
            yield RefitMessage(
                version=version,
                scales="pow2" if self.quantized else "none",
                segments=tuple(str(segment.path) for segment in self.segments),
                slots=slots,
                chunk=chunk,
                chunks=chunks,
            )

    def message(self, version: int, weights: Mapping[str, Tensor]) -> RefitMessage:
        return next(self.messages(version, weights))

    def _write(self, rank: int, slots: list[TensorSlot], weights: Mapping[str, Tensor]) -> None:
        views = {slot.name: self.segments[rank].view(slot) for slot in slots}
        for piece in pieces(self.spec, self.layout, rank):
            weight, name = weights[piece.hf_name], piece.local_name
            if piece.hf_name in self.quantized:
                q = quant_weight(weight)
                _copy(q.codes, views.get(name), piece, 1)
                _copy(q.scale, views.get(name + SCALE_SUFFIX), piece, 128)
            else:
                _copy(weight, views.get(name), piece, 1)


def _copy(whole: Tensor, local: Tensor | None, piece: Piece, unit: int) -> None:
    """The piece of a whole tensor into its place in a local one; `unit` elements of the weight are one of these."""
    if local is None:
        return
    spans = [
        [slice(start // unit, -(-(start + size) // unit)) for start, size in zip(at, piece.size)]
        for at in (piece.local_start, piece.hf_start)
    ]
    target, source = ([rows] if whole.dim() == 1 else [rows, cols] for rows, cols in spans)
    local[*target] = whole[*source]


def trainer_logprobs(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    quantized: Collection[str],
    sequences: list[list[int]],
    temperature: float,
) -> list[Tensor]:
    """Log-prob of every token but the first of each sequence, FP32, by the functions that a trainer's layers call: the
    sequences packed into one batch, residual sums and norms as separate operations."""

    def linear(x: Tensor, *names: str) -> Tensor:
        if names[0] in quantized:
            return torch.cat([fp8_linear(x, None, quant_weight(weights[name])) for name in names], -1)
        return F.linear(x, torch.cat([weights[name] for name in names]))

    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    table = Rope.from_hf_config(spec.config)
    x = F.embedding(tokens, weights["model.embed_tokens.weight"])
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}."
        h = rms_norm(x, weights[at + "input_layernorm.weight"], spec.rms_eps)
        qkv = linear(h, *(f"{at}self_attn.{part}_proj.weight" for part in "qkv"))
        q, k, v = qkv.split([spec.q_rows, spec.kv_rows, spec.kv_rows], -1)
        q, k, v = (part.reshape(len(tokens), -1, spec.head_dim) for part in (q, k, v))
        q = rms_norm(q, weights[at + "self_attn.q_norm.weight"], spec.rms_eps)
        k = rms_norm(k, weights[at + "self_attn.k_norm.weight"], spec.rms_eps)
        q, k = rope(q, k, positions, table)
        x = x + linear(attention(q, k, v, cu_seqlens, spec.head_dim**-0.5), at + "self_attn.o_proj.weight")
        h = rms_norm(x, weights[at + "post_attention_layernorm.weight"], spec.rms_eps)
        h = silu_mul(linear(h, at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight"))
        x = x + linear(h, at + "mlp.down_proj.weight")
    x = rms_norm(x, weights["model.norm.weight"], spec.rms_eps)
    head = weights["model.embed_tokens.weight" if spec.tied else "lm_head.weight"]
    logp = (head_logits(x, head) / temperature).log_softmax(-1)
    targets = torch.roll(tokens, -1)
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
    return [part[:-1] for part in chosen.split(lengths)]
