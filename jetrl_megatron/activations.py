"""What both sides write down of one sequence's forward pass: a digest for each operation, in the order of the model.

A digest is keyed by the position of every byte in the whole tensor (`jetrl_kernels.digest`), so shards of heads,
columns or rows add up to the digest of the whole, whatever the parallel sizes of trainer and engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from jetrl_kernels.digest import combine, digest_tensor

LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.rope of q",
    "self_attn.rope of k",
    "self_attn.attention",
    "self_attn.o_proj",
    "residual sum after self_attn",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.act_fn",
    "mlp.down_proj",
    "residual sum after mlp",
)
"""Operations of a decoder layer, first to last, by the names of Hugging Face's modules where there is one."""

LOGIT_ROWS = 1024
"""Tokens whose logits are in memory at once."""


def operations(layers: int) -> Iterator[str]:
    """Names of all operations up to the logits, in the order in which they run."""
    yield "embed_tokens"
    for number in range(layers):
        yield from (at(number, name) for name in LAYER)
    yield from ("norm", "lm_head")


def at(layer: int, operation: str) -> str:
    return f"layer {layer}, {operation}"


class Recorder:
    """Digests of the rows of one sequence; the first pass counts.

    Args:
        start: row of the batch at which the sequence begins.
        length: its tokens.
    """

    def __init__(self, start: int, length: int):
        self.start, self.length = start, length
        self._found: dict[str, Tensor] = {}

    def add(self, name: str, x: Tensor, *, col0: int = 0, first_row: int = 0) -> None:
        """Note (a shard of) an operation's result.

        Args:
            x: `[T, ..., C]`; dimensions after the first are flattened.
            col0: column of the whole result that the shard begins with.
            first_row: row of the batch that the shard begins with.
        """
        if name in self._found:
            return
        rows = x.flatten(1)[max(0, self.start - first_row) : max(0, self.start + self.length - first_row)]
        # Adding zero turns -0.0 into 0.0: a reduction over ranks does, one rank does not, and nothing depends on it.
        self._found[name] = digest_tensor(rows + 0, row0=max(0, first_row - self.start), col0=col0)

    def add_logits(self, hidden: Tensor, logits, *, col0: int = 0) -> None:
        """The head's result for final hidden states `[length, H]`; `logits` computes `[t, V]` of `[t, H]`, or None."""
        parts = []
        for row in range(0, self.length, LOGIT_ROWS):
            z = logits(hidden[row : row + LOGIT_ROWS])
            if z is not None:
                parts.append(digest_tensor(z + 0, row0=row, col0=col0))
        if parts:
            self._found["lm_head"] = torch.stack(parts).sum()

    def rows(self, x: Tensor) -> Tensor:
        """The sequence's rows of a result that is not cut by rows."""
        return x[self.start : self.start + self.length]

    def found(self) -> dict[str, int]:
        """Digest (of this rank's shard) by operation; waits for the device."""
        return {name: combine([int(value.item())]) for name, value in self._found.items()}


def merge(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Digests of the whole results from those of all ranks."""
    parts: dict[str, list[int]] = {}
    for rank in ranks:
        for name, value in rank.items():
            parts.setdefault(name, []).append(value)
    return {name: combine(values) for name, values in parts.items()}


def first_difference(ours: Mapping[str, int], theirs: Mapping[str, int], layers: int) -> str | None:
    """The first operation whose results differ, or that only one side noted; None if all are equal."""
    return next((n for n in operations(layers) if ours.get(n) != theirs.get(n)), None)
