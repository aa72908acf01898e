"""First-order time of one step: from peaks and bandwidths, with rates measured on one H200. An estimate, no promise.

Decoding one token for B sequences on one replica: the weights and the KV cache are read once,

    t = (weight bytes + B context kv_token) / (0.8 bandwidth) + 2 ms + 0.03 ms B

The last two terms (launches, sampler and scheduler) and 0.8 are fitted to the rollout table of docs/results.md
(Qwen3-8B on one H200, 32 and 256 sequences, BF16 and FP8): within 20 % of its four numbers. Every answer is taken to
have its longest length, and the context to be half of that: an upper bound.

Training: 6 FLOPs a parameter and token (8 with recompute), plus causal attention 6 h_q length a layer and token, at
700 TFLOP/s in BF16 and 900 in FP8 for linears (measured), 400 for attention; optimizer: 16 bytes a parameter at 0.8 of
the bandwidth. Tensor parallel all-reduces move 8 h bytes a token and layer over NVLink. Refit: a rollout rank's bytes
over the network where there are several nodes, else over NVLink, at half of the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetrl_megatron.config import Config
from jetrl_megatron.hardware import Gpu
from jetrl_megatron.memory import Memory, memory, spec_of

READ = 0.8
FIXED, PER_SEQUENCE = 2e-3, 30e-6
BF16_RATE, FP8_RATE, ATTENTION_RATE = 700e12, 900e12, 400e12
"""Measured on an H200; H100 and H200 have the same peaks."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds."""

    rollout: float
    training: float
    optimizer: float
    refit: float
    concurrent: int
    """Sequences that one replica runs at once."""

    @property
    def total(self) -> float:
        return self.rollout + self.training + self.optimizer + self.refit


def decode_step(weights: float, sequences: int, context: float, kv_token: float, gpu: Gpu) -> float:
    """Seconds for one token of each of `sequences`, `weights` and `kv_token` in bytes on one rank."""
    return (weights + sequences * context * kv_token) / (READ * gpu.bandwidth) + FIXED + PER_SEQUENCE * sequences


def step_time(config: Config, gpu: Gpu) -> StepTime:
    """Raises ConfigError for an unknown model."""
    spec, m = spec_of(config), memory(config, gpu)
    p, r, g = config.parallel, config.rollout, config.grpo
    sequences = g.prompts_per_step * g.group_size
    length = config.model.max_length
    concurrent = max(1, min(r.max_num_seqs, m.kv_tokens // length, -(-sequences // r.replicas)))
    waves = sequences / (r.replicas * concurrent)
    context = length - r.max_response_tokens / 2
    one = decode_step(m.engine_weights, concurrent, context, m.kv_token, gpu)
    rollout = max(1.0, waves) * r.max_response_tokens * one

    ranks = p.world_size
    tokens = sequences * length
    active = _active_parameters(config)
    passes = 8 if config.model.recompute else 6
    rate = FP8_RATE if config.precision.mode == "jetrl" else BF16_RATE
    linear = passes * active * tokens / (ranks * rate)
    attention = passes * spec.num_layers * spec.q_rows * length * tokens / (ranks * ATTENTION_RATE)
    reduce = 0.0
    if p.tp > 1:
        moved = 2 * 8 * spec.hidden_size * spec.num_layers * (p.tp - 1) / p.tp
        reduce = moved * tokens * p.tp / ranks / (0.5 * gpu.link)
    bubble = 1 + (p.pp - 1) / max(1, sequences // p.dp // config.train.micro_batch_size)
    training = (linear + attention + reduce) * bubble
    optimizer = g.updates_per_batch * _optimizer_bytes(m) / (READ * gpu.bandwidth)
    wire = gpu.network if p.nodes > 1 else gpu.link
    return StepTime(
        rollout=rollout,
        training=training,
        optimizer=optimizer,
        refit=m.engine_weights / (0.5 * wire),
        concurrent=concurrent,
    )


def _optimizer_bytes(m: Memory) -> float:
    """Master and moments read and written, gradients read, BF16 weights written."""
    return 2 * m.optimizer + m.gradients + m.weights


def _active_parameters(config: Config) -> float:
    """Parameters that one token meets, embedding excluded."""
    spec = spec_of(config)
    total = 0.0
    for rule in spec.rules():
        if rule.row.hf.endswith("embed_tokens.weight") and not spec.tied:
            continue
        used = spec.experts_per_token if rule.experts > 1 else 1
        total += rule.rows * rule.cols * used * len(spec.layers(rule))
    return total
