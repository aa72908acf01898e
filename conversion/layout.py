"""Where every part of every tensor sits, rank by rank, in a Hugging Face folder, in Megatron-core and in vLLM.

All positions are (row, column) of the Hugging Face tensor and of the rank's local parameter. A 1-D tensor of n elements
counts as n x 1. vLLM's stacked experts [experts, rows, cols] count as their 2-D view [experts * rows, cols]
(`t.flatten(0, 1)`), so that one arithmetic serves all.

What the engines do (megatron-core 0.19.2, vLLM 0.26.0):

* Megatron `linear_qkv`: rows interleaved per KV group, [q heads of group 0, k0, v0, q heads of group 1, ...], cut into
  tp equal runs of rows. With fewer KV groups than tp a run holds part of a group.
* vLLM `qkv_proj`: [q | k | v] of the rank's heads; with fewer KV heads than tp each KV head sits on tp / kv ranks.
* Both fuse gate and up per rank, gate first. Vocabulary rows are padded before they are cut: vLLM to a multiple of 64
  (not of tp), Megatron to a multiple of `vocab_multiple` * tp. Padding is nobody's piece.
* Tied embeddings: vLLM has one parameter; Megatron with pp > 1 has a copy on the last stage, named output_layer.weight.
* Megatron ranks count tp fastest, then ep / data parallel, then pp; experts use etp x ep of the same inner ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from jetrl_conversion.errors import LayoutError
from jetrl_conversion.impossible import find_problems
from jetrl_conversion.model_spec import ModelSpec, Rule, hf_name
from jetrl_conversion.parallel import Coords, Layout, padded_vocab, shard_count

__all__ = ["Block", "Coords", "Layout", "Piece", "Placement", "blocks", "local_shapes", "padded_vocab", "pieces",
           "placements", "require_possible", "shard_count"]  # fmt: skip


class Block(NamedTuple):
    """A rectangle of one Hugging Face tensor and where it lies in the local parameter (before any expert offset)."""

    row: int
    col: int
    rows: int
    cols: int
    local_row: int
    local_col: int


class Piece(NamedTuple):
    hf_name: str
    hf_start: tuple[int, int]
    size: tuple[int, int]
    local_name: str
    local_start: tuple[int, int]


class Placement(NamedTuple):
    """The layers of one pipeline stage that hold a rule's tensor, and the local name (still with {layer}, {expert})."""

    stage: int
    layers: tuple[int | None, ...]
    first_layer: int
    name: str


def shard_of(rule: Rule, layout: Layout, coords: Coords) -> int:
    if rule.row.split == "copy":
        return 0
    return coords.etp if rule.experts > 1 else coords.tp


@functools.lru_cache(maxsize=4096)
def blocks(spec: ModelSpec, rule: Rule, layout: Layout, shard: int) -> tuple[Block, ...]:
    """The rectangles of `rule`'s tensor in shard `shard`. Assumes that `problems` found none."""
    rows, cols, row = rule.rows, rule.cols, rule.row
    count = shard_count(rule, layout)
    if layout.kind == "hf" or row.split == "copy":
        return (Block(0, 0, rows, cols, 0, 0),)
    if row.split == "cols":
        width = cols // count
        return (Block(0, shard * width, rows, width, 0, 0),)
    if row.split == "rows":
        height = rows // count
        return (Block(shard * height, 0, height, cols, row.part * height, 0),)
    if row.split == "vocab":
        height = padded_vocab(spec, layout) // count
        held = min(rows, (shard + 1) * height) - shard * height
        return (Block(shard * height, 0, held, cols, 0, 0),) if held > 0 else ()
    if layout.kind == "vllm":
        return (_vllm_heads(spec, rule, count, shard),)
    return tuple(_megatron_heads(spec, rule, count, shard))


def _vllm_heads(spec: ModelSpec, rule: Rule, tp: int, shard: int) -> Block:
    q_rows = spec.num_heads // tp * spec.head_dim
    if rule.row.part == 0:
        return Block(shard * q_rows, 0, q_rows, rule.cols, 0, 0)
    kv_heads = max(1, spec.num_kv_heads // tp)
    first = shard // max(1, tp // spec.num_kv_heads) * kv_heads if tp >= spec.num_kv_heads else shard * kv_heads
    kv_rows = kv_heads * spec.head_dim
    return Block(first * spec.head_dim, 0, kv_rows, rule.cols, q_rows + (rule.row.part - 1) * kv_rows, 0)


def _megatron_heads(spec: ModelSpec, rule: Rule, tp: int, shard: int) -> Iterator[Block]:
    """Rows of q, k or v within run `shard` of the group-interleaved tensor; one block per KV group touched."""
    dim = spec.head_dim
    q_rows = spec.num_heads // spec.num_kv_heads * dim
    group = q_rows + 2 * dim
    run = group * spec.num_kv_heads // tp
    low, high = shard * run, (shard + 1) * run
    offset, height = [(0, q_rows), (q_rows, dim), (q_rows + dim, dim)][rule.row.part]
    for index in range(low // group, -(-high // group)):
        start = index * group + offset  # where this part of the group starts among the interleaved rows
        begin, end = max(start, low), min(start + height, high)
        if begin < end:
            yield Block(index * height + begin - start, 0, end - begin, rule.cols, begin - low, 0)


@functools.lru_cache(maxsize=1024)
def placements(spec: ModelSpec, rule: Rule, layout: Layout) -> tuple[Placement, ...]:
    """Pipeline stages that hold the tensor. The first is the one to read from; a second is the copy of a tied head."""
    name, last = _name(rule, layout), layout.pp - 1
    if rule.row.where == "model":
        if not rule.row.hf.startswith("model.embed_tokens"):
            return (Placement(last, (None,), 0, name),)
        found = [Placement(0, (None,), 0, name)]
        if layout.kind == "megatron" and spec.tied and last > 0:
            found.append(Placement(last, (None,), 0, "output_layer.weight"))
        return tuple(found)
    per_stage = spec.num_layers // layout.pp
    found = []
    for stage in range(layout.pp):
        first = stage * per_stage
        held = tuple(i for i in spec.layers(rule) if i is not None and first <= i < first + per_stage)
        if held:
            found.append(Placement(stage, held, first, name))
    return tuple(found)


def _name(rule: Rule, layout: Layout) -> str:
    if layout.kind == "hf":
        return rule.row.hf
    if layout.kind == "vllm":
        return rule.row.vllm or ""
    if layout.norm == "te" and rule.row.megatron_te:
        return rule.row.megatron_te
    if layout.experts == "grouped" and rule.row.megatron_grouped:
        return rule.row.megatron_grouped
    return rule.row.megatron


def local_name(placement: Placement, layout: Layout, layer: int | None, local_expert: int) -> str:
    """The exact parameter name: Megatron counts layers and experts from the first that the rank holds."""
    index = layer - placement.first_layer if layout.kind == "megatron" and layer is not None else layer
    return placement.name.format(layer=index, expert=local_expert)


def expert_row_offset(rule: Rule, layout: Layout, local_expert: int) -> int:
    """First row of a local expert in vLLM's stacked parameter; 0 elsewhere."""
    if rule.experts == 1 or layout.kind != "vllm":
        return 0
    return local_expert * stacked_rows(rule, layout)


def stacked_rows(rule: Rule, layout: Layout) -> int:
    """Rows of one expert in vLLM's stacked parameter."""
    return rule.row.parts * rule.rows // layout.expert_tp if rule.row.split == "rows" else rule.rows


def held_experts(rule: Rule, layout: Layout, coords: Coords) -> range:
    """Global indexes of the experts that a rank holds; range(1) for tensors that are not experts."""
    if rule.experts == 1:
        return range(1)
    each = rule.experts // layout.ep
    return range(coords.ep * each, (coords.ep + 1) * each)


def pieces(spec: ModelSpec, layout: Layout, rank: int) -> list[Piece]:
    """Everything that `rank` holds: which rectangle of which Hugging Face tensor lies where in which local parameter.

    Raises:
        LayoutError: the model cannot be built in this layout (all reasons listed), or no such rank.
    """
    require_possible(spec, layout)
    coords, found = layout.coords(rank), []
    for rule in spec.rules():
        shard_blocks = blocks(spec, rule, layout, shard_of(rule, layout, coords))
        experts = held_experts(rule, layout, coords)
        for placement in placements(spec, rule, layout):
            if placement.stage != coords.pp:
                continue
            for layer in placement.layers:
                for expert in experts:
                    at = expert if layout.kind == "hf" else expert - experts.start
                    shift = expert_row_offset(rule, layout, at)
                    name, local = hf_name(rule, layer, expert), local_name(placement, layout, layer, at)
                    for b in shard_blocks:
                        found.append(Piece(name, (b.row, b.col), (b.rows, b.cols), local,
                                           (b.local_row + shift, b.local_col)))  # fmt: skip
    return found


def local_shapes(spec: ModelSpec, layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """Exact shape of every local parameter of `rank`, vocabulary padding included; vLLM's experts are 3-D.

    Raises LayoutError as `pieces` does.
    """
    require_possible(spec, layout)
    coords, shapes = layout.coords(rank), {}
    for rule in spec.rules():
        experts = held_experts(rule, layout, coords)
        shape = _local_shape(spec, rule, layout, len(experts))
        for placement in placements(spec, rule, layout):
            if placement.stage == coords.pp:
                for layer in placement.layers:
                    for expert in experts:
                        at = expert if layout.kind == "hf" else expert - experts.start
                        shapes[local_name(placement, layout, layer, at)] = shape
    return shapes


def _local_shape(spec: ModelSpec, rule: Rule, layout: Layout, experts: int) -> tuple[int, ...]:
    rows, cols, count = rule.rows, rule.cols, shard_count(rule, layout)
    if layout.kind != "hf":
        if rule.row.split == "vocab":
            rows = padded_vocab(spec, layout) // count
        elif rule.row.split == "cols":
            cols //= count
        elif rule.row.split == "rows":
            rows = rule.row.parts * rows // count
        elif rule.row.split == "qkv" and layout.kind == "megatron":
            rows = (spec.q_rows + 2 * spec.kv_rows) // count
        elif rule.row.split == "qkv":
            rows = (spec.num_heads // count + 2 * max(1, spec.num_kv_heads // count)) * spec.head_dim
        if layout.kind == "vllm" and rule.experts > 1:
            return (experts, rows, cols)
    return (rows,) if rule.ndim == 1 else (rows, cols)


def require_possible(spec: ModelSpec, layout: Layout) -> None:
    """Raise LayoutError with every reason for which the model cannot be built in this layout."""
    found = problems(spec, layout)
    if found:
        raise LayoutError([f"{name}: {reason} in {layout}" for name, reason in found])


@functools.lru_cache(maxsize=512)
def problems(spec: ModelSpec, layout: Layout) -> tuple[tuple[str, str], ...]:
    """(Hugging Face name with `*`, reason) for everything that makes the layout impossible for this model."""
    return tuple(find_problems(spec, layout))
