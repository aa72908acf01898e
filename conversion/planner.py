"""Which bytes go from which rank of one layout to which rank of another. Pure arithmetic on shapes.

Every byte of every destination rank is written exactly once, from one source rank. Where several source ranks hold
the same rectangle (norms, routers, data-parallel copies, replicated KV heads) they take turns by rank and layer;
with `nodes` given, those on the destination's own node come first.
Nothing is ever gathered: a transfer is the overlap of one source rectangle and one destination rectangle, and for an
FP8 tensor it consists of whole 128 x 128 tiles, so the scales travel as the same rectangle divided by 128.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jetrl_conversion.layout import (
    Placement,
    blocks,
    expert_row_offset,
    held_experts,
    local_name,
    placements,
    require_possible,
    shard_of,
)
from jetrl_conversion.model_spec import ModelSpec, Rule, hf_name
from jetrl_conversion.parallel import Coords, Layout, shard_count
from jetrl_conversion.tiles import Violation, quantized_layers, quantized_tensors, violations
from jetrl_kernels.formats import BLOCK

__all__ = ["Plan", "Transfer", "Violation", "plan_reshard", "quantized_layers", "quantized_tensors", "violations"]


class Transfer(NamedTuple):
    """One rectangle of one tensor: from `src_start` of `src_local` on `src_rank` to `dst_start` of `dst_local`.

    Positions are (row, column) as in `layout.Piece`; `hf_start` is where the rectangle lies in the Hugging Face tensor.
    """

    hf_name: str
    src_rank: int
    src_local: str
    src_start: tuple[int, int]
    dst_rank: int
    dst_local: str
    dst_start: tuple[int, int]
    size: tuple[int, int]
    hf_start: tuple[int, int]
    quantized: bool

    @property
    def nbytes(self) -> int:
        """Bytes moved: FP8 codes plus FP32 scales, or BF16 elements."""
        return _nbytes(self.size[0], self.size[1], self.quantized)

    @property
    def scale(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """(src_start, dst_start, size) of the same rectangle in the scale tensors; only for `quantized`."""
        rows, cols = self.size
        return (
            (self.src_start[0] // BLOCK, self.src_start[1] // BLOCK),
            (self.dst_start[0] // BLOCK, self.dst_start[1] // BLOCK),
            (-(-rows // BLOCK), -(-cols // BLOCK)),
        )


class _Overlap(NamedTuple):
    """A rectangle that a destination shard takes from any of `sources` = (shard, local row, local col)."""

    sources: tuple[tuple[int, int, int], ...]
    row: int
    col: int
    rows: int
    cols: int
    dst_row: int
    dst_col: int


@dataclass
class Plan:
    """All transfers between two layouts. Made by `plan_reshard`; transfers are produced on demand."""

    spec: ModelSpec
    src: Layout
    dst: Layout
    quantized: dict[Rule, frozenset[int | None]]
    """Rule -> layers in which it travels as FP8."""
    nodes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Node of each source rank and of each destination rank, where a near copy is to be preferred to a far one."""
    _overlaps: dict[tuple[Rule, int], tuple[_Overlap, ...]] = field(default_factory=dict, repr=False)
    _holders: dict[tuple[Rule, int, int], tuple[int, ...]] = field(default_factory=dict, repr=False)

    @property
    def transfers(self) -> list[Transfer]:
        return list(self._walk(range(self.dst.world), None))

    def receives(self, rank: int) -> list[Transfer]:
        """What destination rank `rank` receives."""
        self.dst.coords(rank)
        return list(self._walk((rank,), None))

    def sends(self, rank: int) -> list[Transfer]:
        """What source rank `rank` sends."""
        self.src.coords(rank)
        return list(self._walk(range(self.dst.world), rank))

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_received().values())

    def bytes_received(self) -> dict[int, int]:
        """Bytes that each destination rank receives."""
        return dict(self._counts[1])

    def bytes_sent(self) -> dict[int, int]:
        """Bytes that each source rank sends."""
        return dict(self._counts[0])

    def bytes_of(self, rule: Rule) -> int:
        """Bytes moved for one line of the family's table, over all its layers and experts."""
        return self._counts[2][rule]

    @functools.cached_property
    def _counts(self) -> tuple[dict[int, int], dict[int, int], dict[Rule, int]]:
        """Bytes by source rank, destination rank and rule, counted without making Transfer objects."""
        sent, received = dict.fromkeys(range(self.src.world), 0), dict.fromkeys(range(self.dst.world), 0)
        by_rule: dict[Rule, int] = {}
        for index, rule in enumerate(self.spec.rules()):
            before, fp8_layers = sum(received.values()), self.quantized.get(rule, ())
            stages = {layer: self._source_placement(rule, layer).stage for layer in self.spec.layers(rule)}
            for dst_rank, placement in self._destinations(rule, range(self.dst.world)):
                coords = self.dst.coords(dst_rank)
                by_ep = self._experts_by_source(rule, held_experts(rule, self.dst, coords))
                turn = index + self._turn(rule, dst_rank, coords)
                for o in self._overlap(rule, shard_of(rule, self.dst, coords)):
                    as_bf16, as_fp8 = _nbytes(o.rows, o.cols, False), _nbytes(o.rows, o.cols, True)
                    for layer in placement.layers:
                        size = as_fp8 if layer in fp8_layers else as_bf16
                        for ep, experts in by_ep.items():
                            src_rank, _ = self._pick(rule, o, stages[layer], ep, turn + (layer or 0), dst_rank)
                            sent[src_rank] += size * len(experts)
                            received[dst_rank] += size * len(experts)
            by_rule[rule] = sum(received.values()) - before
        return sent, received, by_rule

    def _walk(self, dst_ranks: Iterable[int], only_src: int | None) -> Iterator[Transfer]:
        src, dst = self.src, self.dst
        src_each = {rule: rule.experts // src.ep for rule in self.spec.rules()}
        only_stage = None if only_src is None else src.coords(only_src).pp
        for index, rule in enumerate(self.spec.rules()):
            fp8_layers = self.quantized.get(rule, ())
            for dst_rank, placement in self._destinations(rule, dst_ranks):
                coords = dst.coords(dst_rank)
                experts = held_experts(rule, dst, coords)
                by_ep = self._experts_by_source(rule, experts)
                overlaps = self._overlap(rule, shard_of(rule, dst, coords))
                turn = index + self._turn(rule, dst_rank, coords)
                for layer in placement.layers:
                    source = self._source_placement(rule, layer)
                    if only_stage is not None and source.stage != only_stage:
                        continue
                    for o in overlaps:
                        for ep, held in by_ep.items():
                            src_rank, at = self._pick(rule, o, source.stage, ep, turn + (layer or 0), dst_rank)
                            if only_src is not None and src_rank != only_src:
                                continue
                            for e in held:
                                src_e = e if src.kind == "hf" else e - ep * src_each[rule]
                                dst_e = e if dst.kind == "hf" else e - experts.start
                                yield Transfer(
                                    hf_name(rule, layer, e),
                                    src_rank,
                                    local_name(source, src, layer, src_e),
                                    (at[1] + expert_row_offset(rule, src, src_e), at[2]),
                                    dst_rank,
                                    local_name(placement, dst, layer, dst_e),
                                    (o.dst_row + expert_row_offset(rule, dst, dst_e), o.dst_col),
                                    (o.rows, o.cols),
                                    (o.row, o.col),
                                    layer in fp8_layers,
                                )

    def _destinations(self, rule: Rule, ranks: Iterable[int]) -> Iterator[tuple[int, Placement]]:
        found = placements(self.spec, rule, self.dst)
        for rank in ranks:
            stage = rank // self.dst.inner
            for placement in found:
                if placement.stage == stage:
                    yield rank, placement

    def _source_placement(self, rule: Rule, layer: int | None) -> Placement:
        found = placements(self.spec, rule, self.src)
        if layer is None or len(found) == 1:
            return found[0]
        stage = layer // (self.spec.num_layers // self.src.pp)
        return next(placement for placement in found if placement.stage == stage)

    def _experts_by_source(self, rule: Rule, experts: range) -> dict[int, range]:
        """Destination experts grouped by the source's expert-parallel index."""
        if rule.experts == 1:
            return {0: experts}
        each = rule.experts // self.src.ep
        return {
            ep: range(max(experts.start, ep * each), min(experts.stop, (ep + 1) * each))
            for ep in range(experts.start // each, (experts.stop - 1) // each + 1)
        }

    def _turn(self, rule: Rule, dst_rank: int, coords: Coords) -> int:
        """Number of this rank among those that draw on the same source ranks, so that these are used in turns."""
        shards = shard_count(rule, self.dst)
        ratio = max(1, shards // shard_count(rule, self.src))
        groups = self.dst.ep if rule.experts > 1 else 1
        ratio_ep = max(1, groups // self.src.ep)
        copy = dst_rank % self.dst.inner // (shards * groups)
        return (copy * ratio + shard_of(rule, self.dst, coords) % ratio) * ratio_ep + coords.ep % ratio_ep

    def _pick(
        self, rule: Rule, overlap: _Overlap, stage: int, ep: int, turn: int, dst_rank: int
    ) -> tuple[int, tuple[int, int, int]]:
        """The source rank of this rectangle, and (shard, local row, local col) there."""
        pools = [self._ranks(rule, at[0], ep) for at in overlap.sources]
        first = stage * self.src.inner
        if self.nodes is not None:
            sources, node = self.nodes[0], self.nodes[1][dst_rank]
            near = [
                (first + rank, at)
                for ranks, at in zip(pools, overlap.sources)
                for rank in ranks
                if sources[first + rank] == node
            ]
            if near:
                return near[turn % len(near)]
        turn %= len(pools) * len(pools[0])
        return first + pools[turn % len(pools)][turn // len(pools)], overlap.sources[turn % len(pools)]

    def _ranks(self, rule: Rule, shard: int, ep: int) -> tuple[int, ...]:
        """Inner source ranks that hold shard `shard` of expert group `ep` (any, for tensors that are not experts)."""
        key = (rule, shard, ep)
        if key not in self._holders:
            found = []
            for rank in range(self.src.inner):
                coords = self.src.coords(rank)
                if shard_of(rule, self.src, coords) == shard and (rule.experts == 1 or coords.ep == ep):
                    found.append(rank)
            self._holders[key] = tuple(found)
        return self._holders[key]

    def _overlap(self, rule: Rule, dst_shard: int) -> tuple[_Overlap, ...]:
        key = (rule, dst_shard)
        if key not in self._overlaps:
            self._overlaps[key] = tuple(_intersect(self.spec, rule, self.src, self.dst, dst_shard))
        return self._overlaps[key]


def _intersect(spec: ModelSpec, rule: Rule, src: Layout, dst: Layout, dst_shard: int) -> Iterator[_Overlap]:
    """Cut each destination rectangle by the source's; equal source rectangles are alternatives of one another."""
    held: dict[tuple[int, int, int, int], list] = {}
    for shard in range(shard_count(rule, src)):
        for s in blocks(spec, rule, src, shard):
            held.setdefault((s.row, s.col, s.rows, s.cols), []).append((shard, s))
    for d in blocks(spec, rule, dst, dst_shard):
        for (row, col, rows, cols), copies in held.items():
            top, left = max(row, d.row), max(col, d.col)
            height, width = min(row + rows, d.row + d.rows) - top, min(col + cols, d.col + d.cols) - left
            if height > 0 and width > 0:
                sources = tuple((n, s.local_row + top - row, s.local_col + left - col) for n, s in copies)
                yield _Overlap(sources, top, left, height, width, d.local_row + top - d.row, d.local_col + left - d.col)


def _nbytes(rows: int, cols: int, fp8: bool) -> int:
    if not fp8:
        return 2 * rows * cols
    return rows * cols + 4 * -(-rows // BLOCK) * -(-cols // BLOCK)


def plan_reshard(
    spec: ModelSpec,
    src: Layout,
    dst: Layout,
    *,
    fp8: bool = True,
    keep_bf16: Iterable[str] = (),
    nodes: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Plan:
    """Plan the move of a model from `src` to `dst`.

    Args:
        nodes: node of each source and of each destination rank; a copy on the destination's node is preferred.
        fp8: move what both layouts can hold as FP8 codes with scales (`tiles.quantized_layers`); False: all BF16.
        keep_bf16: glob patterns over Hugging Face names that stay BF16, e.g. `*.down_proj.weight`.

    Raises:
        LayoutError: the model cannot be built in one of the layouts; every reason is listed.
    """
    for layout in (src, dst):
        require_possible(spec, layout)
    return Plan(spec, src, dst, quantized_layers(spec, src, dst, keep_bf16=keep_bf16) if fp8 else {}, nodes)
