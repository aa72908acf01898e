"""One forward (and backward) pass of the whole world over packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from jetrl_kernels.fused_logprob import fused_logprob
from jetrl_megatron.batch import PackedBatch
from jetrl_megatron.megatron.model import unwrap

LossFunction = Callable[[PackedBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(batch, logp `[T]`, entropy `[T]`) -> (sum over this micro-batch divided by the step's denominator, stats). Log-prob
and entropy are 0 but at `batch.predicting`."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters, and each token's position within its sequence (int64 `[T]`)."""

    positions: Tensor | None = None


def _logprobs(hidden_states: Tensor, output_layer, output_weight, context, config, **_) -> Tensor:
    """Output processor of GPTModel: final hidden states `[T(/tp), 1, H]` -> FP32 `[2, T]` (log-prob, entropy).

    Prompts and padding do not reach the head, the widest matrix of the model; there both are 0.
    """
    batch, temperature, vocab_size, exact = context
    weight = output_weight if output_weight is not None else output_layer.weight
    group = output_layer.tp_group
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
    found = fused_logprob(
        hidden.squeeze(1).index_select(0, batch.predicting),
        weight,
        batch.targets[batch.predicting],
        vocab_start=group.rank() * weight.shape[0],
        vocab_size=vocab_size,
        temperature=temperature,
        group=group if group.size() > 1 else None,
        logits_dtype=torch.float32,
        # Gathering logits costs a GPU bandwidth that only exact parity is worth.
        whole=exact or group.size() == 1 or not hidden.is_cuda,
    )
    everywhere = torch.zeros(2, hidden.shape[0], device=hidden.device)
    return everywhere.index_copy(1, batch.predicting, torch.stack(found))


def run(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    loss: LossFunction,
    *,
    temperature: float,
    vocab_size: int,
    exact: bool = False,
    forward_only: bool = False,
) -> list[dict[str, Tensor]]:
    """Run all micro-batches through the pipeline; gradients accumulate in FP32 `main_grad`.

    Args:
        loss: called on the last pipeline stage. Its sums over all micro-batches and data-parallel ranks must add up
            to the step's loss, so it divides by the step's own denominator.
        temperature: sampling temperature; log-probs are those of `softmax(logits / temperature)`.
        vocab_size: true vocabulary; Megatron's padding rows do not enter the softmax.
        exact: compute log-probs as the engine does also where that costs time (a vocabulary split over GPUs).

    Returns:
        The stats of every micro-batch on the last pipeline stage, an empty list elsewhere.
    """
    from megatron.core import parallel_state

    # Megatron divides by the number of micro-batches and averages over data-parallel ranks; the loss needs neither.
    scale = len(batches) * parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def step(iterator: Iterator[PackedBatch], wrapped: torch.nn.Module):
        batch = next(iterator)
        packed = PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            positions=batch.positions,
            max_seqlen_q=batch.longest,
            max_seqlen_kv=batch.longest,
        )
        output = wrapped(
            batch.tokens[None],
            batch.positions[None],
            None,
            packed_seq_params=packed,
            output_processor=_logprobs,
            output_processor_context=(batch, temperature, vocab_size, exact),
        )

        def finish(logp_and_entropy: Tensor):
            logp, entropy = logp_and_entropy.unbind(0)
            value, stats = loss(batch, logp, entropy)
            return value * scale, stats

        return output, finish

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=batches[0].tokens.numel(),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def logprobs(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    *,
    temperature: float,
    vocab_size: int,
    exact: bool = False,
) -> list[Tensor]:
    """FP32 log-probs `[T]` of every micro-batch (0 but at `predicting`); without gradient; only on the last stage."""

    def keep(batch: PackedBatch, logp: Tensor, entropy: Tensor):
        return logp.sum() * 0.0, {"logp": logp.detach()}

    training = unwrap(model).training
    model.eval()
    with torch.no_grad():
        outputs = run(
            model, batches, keep, temperature=temperature, vocab_size=vocab_size, exact=exact, forward_only=True
        )
    model.train(training)
    return [stats["logp"] for stats in outputs]
