"""A step's data, typed: sampled sequences, and packed micro-batches made of them.

A packed micro-batch holds whole sequences one after another in `[T]` tensors. The log-prob of token i+1 is read at
position i, so every per-token target is stored at the position that predicts it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Sample:
    """One answer to one prompt, by the engine's own token ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    engine_logp: list[float]
    """The engine's log-probs of `response_ids` at sampling, natural log."""
    policy_version: int
    """Version of the weights that sampled every token of this answer."""
    group: int
    """Index of the prompt within the step: answers to one prompt form a group."""
    finish_reason: str
    reward: float = 0.0
    advantage: float = 0.0

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(kw_only=True)
class PackedBatch:
    """Whole sequences packed into one row of T positions; the tail that pads T is a segment of its own, masked."""

    tokens: Tensor
    """int64 `[T]`"""
    positions: Tensor
    """int64 `[T]`, restarting at 0 with every sequence"""
    cu_seqlens: Tensor
    """int32 `[sequences + 1]`, padding segment included"""
    targets: Tensor
    """int64 `[T]`: the next token of the same sequence; 0 where there is none"""
    mask: Tensor
    """bool `[T]`: this position predicts a token that the policy sampled"""
    predicting: Tensor
    """int64 `[P]`: the positions where `mask` holds, known here so that nothing waits for the device to count them"""
    engine_logp: Tensor
    """float32 `[T]`"""
    advantages: Tensor
    """float32 `[T]`"""
    sequence: Tensor
    """int64 `[T]`: which sequence of this batch a position belongs to; the padding segment comes last"""
    longest: int
    """tokens of the longest segment, known here so that no kernel launch waits for the device to tell"""

    def to(self, device: torch.device) -> PackedBatch:
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return PackedBatch(**{**vars(self), **tensors})


def pack(sequences: Sequence[Sample], length: int, pad_id: int = 0) -> PackedBatch:
    """Pack sequences into `length` positions.

    Raises:
        ValueError: when they need more than `length` positions.
    """
    used = sum(len(s) for s in sequences)
    if used > length:
        raise ValueError(f"{used} tokens do not fit a packed batch of {length}")
    tokens = torch.full((length,), pad_id, dtype=torch.int64)
    positions = torch.zeros(length, dtype=torch.int64)
    targets = torch.zeros(length, dtype=torch.int64)
    mask = torch.zeros(length, dtype=torch.bool)
    engine_logp = torch.zeros(length)
    advantages = torch.zeros(length)
    sequence = torch.full((length,), len(sequences), dtype=torch.int64)
    bounds = [0]
    for number, s in enumerate(sequences):
        start, end = bounds[-1], bounds[-1] + len(s)
        ids = torch.tensor(s.prompt_ids + s.response_ids)
        tokens[start:end] = ids
        positions[start:end] = torch.arange(end - start)
        targets[start : end - 1] = ids[1:]
        predicts = slice(start + len(s.prompt_ids) - 1, end - 1)
        mask[predicts] = True
        engine_logp[predicts] = torch.tensor(s.engine_logp)
        advantages[predicts] = s.advantage
        sequence[start:end] = number
        bounds.append(end)
    if used < length:
        positions[used:] = torch.arange(length - used)
        bounds.append(length)
    return PackedBatch(
        tokens=tokens,
        positions=positions,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        targets=targets,
        mask=mask,
        predicting=mask.nonzero().squeeze(1),
        engine_logp=engine_logp,
        advantages=advantages,
        sequence=sequence,
        longest=max(b - a for a, b in itertools.pairwise(bounds)),
    )


def balance(lengths: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Deal indices of `lengths` into bins of exactly `counts` items, so that the bins' sums are nearly equal.

    Longest first, each to the bin with the smallest sum among those with room; then the fullest and the emptiest bin
    exchange the pair that brings them closest together, until no pair does. Deterministic.

    Raises:
        ValueError: the counts do not add up to the number of items.
    """
    if sum(counts) != len(lengths):
        raise ValueError(f"bins of {list(counts)} items do not hold {len(lengths)}")
    bins: list[list[int]] = [[] for _ in counts]
    load = [0] * len(bins)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = min((b for b in range(len(bins)) if len(bins[b]) < counts[b]), key=lambda b: (load[b], b))
        bins[target].append(index)
        load[target] += lengths[index]
    while len(bins) > 1:
        full, empty = max(range(len(bins)), key=load.__getitem__), min(range(len(bins)), key=load.__getitem__)
        gap = load[full] - load[empty]
        pairs = ((abs(gap - 2 * (lengths[i] - lengths[j])), i, j) for i in bins[full] for j in bins[empty])
        left, i, j = min(pairs, default=(gap, 0, 0))
        if left >= gap:
            break
        bins[full][bins[full].index(i)], bins[empty][bins[empty].index(j)] = j, i
        load[full] -= lengths[i] - lengths[j]
        load[empty] += lengths[i] - lengths[j]
    return bins


def split_for_ranks(sequences: Sequence[Sample], dp: int, size: int) -> list[list[int]]:
    """Indices of the sequences of each data-parallel rank: equal counts, token sums balanced.

    Each share is in such an order that its runs of `size` sequences, the micro-batches, have balanced sums as well:
    all of them are padded to the longest.
    """
    lengths = [len(s) for s in sequences]
    count = len(sequences) // dp
    runs = [min(size, count - start) for start in range(0, count, size)]
    shares = balance(lengths, [count] * dp)
    return [[share[i] for run in balance([lengths[i] for i in share], runs) for i in run] for share in shares]


def padding_multiple(tp: int, gpu: bool) -> int:
    """What the tokens of a micro-batch are padded to a multiple of: sequence parallel splits them over `tp` ranks, and
    FP8 GEMMs on a GPU want whole groups of 128 for WGrad."""
    return 128 * tp if gpu else tp


def micro_batches(
    sequences: Sequence[Sample], shares: list[list[int]], rank: int, size: int, multiple: int
) -> list[PackedBatch]:
    """This rank's packed micro-batches of at most `size` sequences.

    All ranks and all micro-batches get the same length (pipeline stages exchange tensors of one shape): the longest
    one's, rounded up to `multiple`.
    """
    cut = [[share[i : i + size] for i in range(0, len(share), size)] for share in shares]
    longest = max(sum(len(sequences[i]) for i in part) for share in cut for part in share)
    length = -(-longest // multiple) * multiple
    return [pack([sequences[i] for i in part], length) for part in cut[rank]]
