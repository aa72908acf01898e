"""FlashAttention 3, as vLLM's wheel carries it, over keys cut at fixed positions: what trainer and engine both call.

One call never splits the keys that it is given. A context of more than `PART` keys is given in parts, which begin at
multiples of `PART` keys: the part that a query lies in itself (causal), and the whole parts before it. Up to `PART`
keys there is one part, and nothing but one call.

For equal bits every call must run the kernel with the same tile of keys. For heads of 97 to 128 that is 128 keys where
the call is causal or reads pages, and 176 where it is neither: hence the trainer gives earlier parts as pages, of one
key each.
Letters: T query tokens, S sequences, P parts, N query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetrl_kernels.attention_parts import PART, merge_parts


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool,
    starts: Tensor,
    longest: int,
    longest_k: int,
    rows: Tensor | None = None,
    starts_k: Tensor | None = None,
    keys: Tensor | None = None,
    pages: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """vLLM's FlashAttention 3 forward with one split; `torch.ops._vllm_fa3_C` must be loaded.

    Args:
        q: `[T, N, D]` BF16.
        k, v: `[keys, G, D]`, or `[pages, keys of a page, G, D]` with `pages`.
        causal: the last row of a sequence sees all of its keys, each row before it one less.
        starts: int32 `[S + 1]`, first rows of sequences in q. longest: rows of the longest. longest_k: its keys.
        rows: int32 `[S]`, rows of each sequence, if they do not reach to the next start. Rows of no sequence are left
            as they are in `out`.
        starts_k: as `starts`, in k. keys: int32 `[S]`, number of keys. pages: int32 `[S, pages of a sequence]`.

    Returns:
        (output `[T, N, D]` BF16, natural log-sum-exp FP32 `[N, T]`).
    """
    none = None
    out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
        q, k, v, none, none, none, out,  # k_new, v_new, q_v
        starts, starts_k, none, rows, keys, longest, longest_k,  # cu_seqlens_k_new
        pages, none, none,  # kv_batch_idx, leftpad_k
        none, none, none,  # rotary cosines, sines, seqlens
        none, none, none,  # descaling of q, k, v
        scale, causal, -1, -1, 0.0,  # window, softcap
        True, none, 1,  # rotary_interleaved, scheduler metadata, num_splits
        none, 0, none,  # pack_gqa, sm_margin, s_aux
        1, 0, none,  # context parallel: world size, rank, lengths
    )  # fmt: skip
    assert out is not None
    return out, lse


def parts_of(longest_k: int, part: int = PART) -> int:
    """Parts of a context of so many keys."""
    return max(1, -(-longest_k // part))


@dataclass(frozen=True)
class Cuts:
    """Where the query rows of packed sequences lie relative to the borders of parts. All int32, on the GPU."""

    part: int
    parts: int
    own_starts: Tensor
    """`[S P + 1]`: first row of each sequence in each part, as sequences of their own (many without rows)."""
    own_keys: Tensor
    """`[S P]`: keys of that part which the last of these rows sees; 0 without rows."""
    earlier_starts: Tensor
    """`[P - 1, S + 1]`: first row of each sequence that lies behind part p."""
    earlier_rows: Tensor
    """`[P - 1, S]`: how many rows do."""
    lengths: Tensor
    """`[T]`: keys that each row sees."""


def cut(starts: Tensor, contexts: Tensor, tokens: int, longest_k: int, part: int = PART) -> Cuts:
    """Cut the keys of packed sequences whose queries are their last tokens. Never waits for the GPU.

    Args:
        starts: int32 `[S + 1]`, first query row of each sequence.
        contexts: int32 `[S]`, keys of each sequence, its queries included.
        tokens: T; rows from `starts[-1]` on see nothing.
        longest_k: at least the largest context.
    """
    parts = parts_of(longest_k, part)
    first, counts = starts[:-1], starts.diff()
    before = contexts - counts
    border = torch.arange(parts + 1, device=starts.device, dtype=torch.int32) * part
    # [S, P + 1]: rows of a sequence that lie before each border.
    row = torch.minimum((border - before[:, None]).clamp_(min=0), counts[:, None])
    own = row.diff(dim=1)
    own_keys = (contexts[:, None] - border[:-1]).clamp_(max=part).masked_fill_(own == 0, 0)
    token = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    sequence = torch.searchsorted(starts[1:], token, right=True)
    lengths = token + 1 + (before - first)[sequence.clamp_(max=counts.shape[0] - 1)]
    lengths.masked_fill_(token >= starts[-1], 0)
    return Cuts(
        part=part,
        parts=parts,
        own_starts=torch.cat(((first[:, None] + row[:, :-1]).flatten(), starts[-1:])),
        own_keys=own_keys.flatten(),
        earlier_starts=torch.cat((first[:, None] + row[:, 1:-1], starts[-1:, None].expand(1, parts - 1)))
        .t()
        .contiguous(),
        earlier_rows=(counts[:, None] - row[:, 1:-1]).t().contiguous(),
        lengths=lengths,
    )


def cut_packed(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, part: int = PART
) -> tuple[Tensor, Tensor]:
    """Causal attention within packed sequences `[T, heads, D]` that are their own keys: (output, log-sum-exp)."""
    cuts, pages = _packed(starts, q.shape[0], longest, part)
    own = {"k": k, "v": v, "starts_k": cuts.own_starts}
    k, v = k.unsqueeze(1), v.unsqueeze(1)
    return _attend(q, cuts, longest, scale, own, lambda p: {"k": k, "v": v, "pages": pages[p]}, None)


@functools.lru_cache(maxsize=2)
def _packed(starts: Tensor, tokens: int, longest: int, part: int) -> tuple[Cuts, Tensor]:
    """Cuts of packed sequences, and int32 `[P - 1, S, part]`: the rows of each earlier part, as pages of one key.

    All layers of a micro-batch pass the same tensor `starts`, which is what the cache goes by.
    """
    cuts = cut(starts, starts.diff(), tokens, longest, part)
    keys = torch.arange((cuts.parts - 1) * part, device=starts.device, dtype=torch.int32).view(-1, 1, part)
    return cuts, (starts[:-1, None] + keys).clamp_(max=tokens - 1)


def cut_paged(q: Tensor, k: Tensor, v: Tensor, cuts: Cuts, own_pages: Tensor, longest: int, scale: float, out: Tensor):
    """The same for queries whose keys lie in pages: a batch with prompts, whole or in chunks.

    Args:
        q, out: `[T, N, D]` BF16. k, v: `[pages, keys of a page, G, D]`.
        own_pages: int32 `[S P, pages of a part]`, a sequence's parts one after another.
        longest: queries of the sequence with most.
    """
    pages = own_pages.view(-1, cuts.parts, own_pages.shape[1])
    own = {"k": k, "v": v, "keys": cuts.own_keys, "pages": own_pages}
    _attend(q, cuts, longest, scale, own, lambda p: {"k": k, "v": v, "pages": pages[:, p]}, out)


def _attend(q: Tensor, cuts: Cuts, longest: int, scale: float, own: dict, earlier, out: Tensor | None):
    planes, lse = q.new_empty((cuts.parts, *q.shape)), []
    for p in range(cuts.parts - 1):
        rows = cuts.earlier_rows[p]
        of_part = {**earlier(p), "keys": torch.full_like(rows, cuts.part)}
        lse.append(
            flash_attention(
                q, scale=scale, causal=False, starts=cuts.earlier_starts[p], rows=rows, longest=longest,
                longest_k=cuts.part, out=planes[p], **of_part,
            )[1]
        )  # fmt: skip
    lse.append(
        flash_attention(
            q, scale=scale, causal=True, starts=cuts.own_starts, longest=min(longest, cuts.part), longest_k=cuts.part,
            out=planes[-1], **own,
        )[1]
    )  # fmt: skip
    return merge_parts(planes, torch.stack(lse), cuts.lengths, part=cuts.part, own_last=True, out=out)


@dataclass(frozen=True)
class DecodeCuts:
    """The parts of a batch of one query each, one after another: S P sequences. Its tensors stay where they are."""

    part: int
    parts: int
    starts: Tensor
    """int32 `[S P + 1]`: 0, 1, 2, ..."""
    rows: Tensor
    """int32 `[S P]`: 1 where a context reaches into a part, else 0."""
    keys: Tensor
    """int32 `[S P]`: keys of the part."""
    pages: Tensor
    """int32 `[S, P pages of a part]`."""
    lengths: Tensor
    """int32 `[S]`: keys of each sequence, 0 for padding."""

    @staticmethod
    def empty(sequences: int, parts: int, page: int, device: torch.device | str, part: int = PART) -> DecodeCuts:
        """Room for so many sequences, with pages of `page` keys."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return DecodeCuts(
            part=part,
            parts=parts,
            starts=torch.arange(sequences * parts + 1, dtype=torch.int32, device=device),
            rows=zeros(sequences * parts),
            keys=zeros(sequences * parts),
            pages=zeros(sequences, parts * part // page),
            lengths=zeros(sequences),
        )

    def first(self, sequences: int, lengths: Tensor) -> DecodeCuts:
        """The first so many sequences, in the same memory; their lengths are read from `lengths`."""
        n = sequences * self.parts
        return replace(
            self, starts=self.starts[: n + 1], rows=self.rows[:n], keys=self.keys[:n], pages=self.pages[:sequences],
            lengths=lengths,
        )  # fmt: skip

    def fill(self, lengths: Tensor, pages: Tensor) -> None:
        """Write lengths `[S]` (keys) and tables `[S, any columns]` of a batch to the front."""
        sequences = lengths.shape[0]
        begins = self.starts[: self.parts] * self.part
        keys = self.keys.view(-1, self.parts)[:sequences]
        torch.clamp(lengths[:, None] - begins, 0, self.part, out=keys)
        torch.clamp(keys, max=1, out=self.rows.view(-1, self.parts)[:sequences])
        columns = min(pages.shape[1], self.pages.shape[1])
        self.pages[:sequences, :columns].copy_(pages[:, :columns])


def cut_decode(q: Tensor, k: Tensor, v: Tensor, cuts: DecodeCuts, scale: float, out: Tensor) -> None:
    """One query of each sequence over its pages, all parts in one call: q, out `[S, N, D]`; may be captured."""
    sequences, heads, dim = q.shape
    each = q[:, None].expand(sequences, cuts.parts, heads, dim).reshape(-1, heads, dim)
    x, lse = flash_attention(
        each, k, v, scale, causal=True, starts=cuts.starts, longest=1, longest_k=cuts.part, rows=cuts.rows,
        keys=cuts.keys, pages=cuts.pages.view(sequences * cuts.parts, -1),
    )  # fmt: skip
    x = x.view(sequences, cuts.parts, heads, dim).transpose(0, 1)
    lse = lse.view(heads, sequences, cuts.parts).permute(2, 0, 1)
    merge_parts(x, lse, cuts.lengths, part=cuts.part, out=out)
