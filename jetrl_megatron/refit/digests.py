"""Digests of live parameters by Hugging Face name, the same number from any layout.

Both sides call this on the memory that their next forward pass reads: the trainer with its Megatron layout, the engine
with its vLLM layout. Digests of the shards of one tensor add up modulo 2**64, so ranks report and `merge_digests` sums.
A replica (a norm on every tensor-parallel rank, the second copy of a tied embedding) is digested as a copy of its own
and must equal the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from jetrl_conversion.layout import Layout, pieces
from jetrl_conversion.model_spec import ModelSpec
from jetrl_kernels.digest import Digests, Shard, combine
from jetrl_kernels.formats import BLOCK
from jetrl_megatron.refit.message import SCALE_SUFFIX
from jetrl_megatron.refit.rectangles import Rectangle, cut


def rank_digests(
    spec: ModelSpec, layout: Layout, rank: int, parameters: Mapping[str, Tensor] | Callable[[str], Tensor | None]
) -> dict[str, int]:
    """Digests of what one rank holds.

    Args:
        parameters: local name -> live tensor, and `name + "_scale_inv"` -> its scales where `name` is FP8; a mapping,
            or a function that returns None for what is not there.

    Returns:
        Hugging Face name -> digest of this rank's part; an FP8 tensor has a second entry, `name + "_scale_inv"`.
        Parts that lower ranks hold as well are under `name#1`, `name#2`, ...: the second, third, ... copy.

    Raises:
        KeyError: a parameter is missing. ValueError: an FP8 piece does not start on the tile grid.
    """
    return Digester(spec, layout, rank)(parameters)


class Digester:
    """`rank_digests` of one rank, time after time: what can be known of parameters that stay where they are is kept."""

    def __init__(self, spec: ModelSpec, layout: Layout, rank: int):
        self.where = f"rank {rank} of {layout}"
        self._pieces = list(zip(pieces(spec, layout, rank), _copies(spec, layout, rank)))
        self._names = list(dict.fromkeys(piece.local_name for piece, _ in self._pieces))
        self._shapes = {piece.hf_name: spec.tensors()[piece.hf_name].shape for piece, _ in self._pieces}
        self._places: list[tuple] = []
        self._tensors: list[str] = []
        self._digests = Digests([], 0)

    def __call__(self, parameters: Mapping[str, Tensor] | Callable[[str], Tensor | None]) -> dict[str, int]:
        """See `rank_digests`."""
        get = parameters if callable(parameters) else parameters.get
        found: dict[str, Tensor] = {}
        for name in self._names:
            for key in (name, name + SCALE_SUFFIX):
                tensor = get(key)
                if tensor is not None:
                    found[key] = tensor
        places = [(key, t.data_ptr(), t.shape, t.stride(), t.dtype) for key, t in found.items()]
        if places != self._places:
            self._tensors, self._digests = self._of(found)
            self._places = places
        return dict(zip(self._tensors, self._digests()))

    def _of(self, parameters: Mapping[str, Tensor]) -> tuple[list[str], Digests]:
        """Names of what is digested, and their digests."""
        shards: list[Shard] = []
        numbers: dict[str, int] = {}

        def add(name: str, tensor: Tensor, at: Rectangle, size: Rectangle, hf: Rectangle, shape: Sequence[int]) -> None:
            """The `size` block at `at` of a local tensor, at its place `hf` in the global tensor of `shape`."""
            block, number = cut(tensor, at, size), numbers.setdefault(name, len(numbers))
            # A 1-D tensor is one row to the digest, a column of n x 1 to the layout.
            row0, col0, columns = (0, hf[0], shape[0]) if block.dim() == 1 else (*hf, shape[1])
            shards.append(Shard(number, block, row0, col0, columns))

        for piece, copy in self._pieces:
            tensor = parameters.get(piece.local_name)
            if tensor is None:
                raise KeyError(f"{piece.local_name}: no such parameter on {self.where}")
            suffix = f"#{copy}" if copy else ""
            place = (piece.local_start, piece.size, piece.hf_start, self._shapes[piece.hf_name])
            add(piece.hf_name + suffix, tensor, *place)
            scales = parameters.get(piece.local_name + SCALE_SUFFIX)
            if scales is not None:
                if any(start % BLOCK for start in (*piece.local_start, *piece.hf_start)):
                    raise ValueError(f"{piece.hf_name}: {piece} does not start on the {BLOCK}x{BLOCK} grid")
                add(piece.hf_name + SCALE_SUFFIX + suffix, scales, *map(_tiles, place))
        return list(numbers), Digests(shards, len(numbers))


def _tiles(pair: Sequence[int]) -> tuple[int, int]:
    """A place or size counted in elements, in tiles."""
    rows, columns = pair
    return -(-rows // BLOCK), -(-columns // BLOCK)


@functools.lru_cache(maxsize=64)
def _copies(spec: ModelSpec, layout: Layout, rank: int) -> tuple[int, ...]:
    """For each of the rank's pieces: how many pieces of lower ranks (or before it) cover the same block."""
    seen: dict[tuple[str, tuple[int, int]], int] = {}
    for other in range(rank):
        for piece in pieces(spec, layout, other):
            key = (piece.hf_name, piece.hf_start)
            seen[key] = seen.get(key, 0) + 1
    found = []
    for piece in pieces(spec, layout, rank):
        key = (piece.hf_name, piece.hf_start)
        found.append(seen.get(key, 0))
        seen[key] = found[-1] + 1
    return tuple(found)


def merge_digests(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Digests of the whole model from those of all ranks. A copy that differs from the first keeps its own entry."""
    found: dict[str, list[int]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    sums = {name: combine(values) for name, values in found.items()}
    return {name: value for name, value in sums.items() if "#" not in name or value != sums[name.partition("#")[0]]}


def differing(ours: Mapping[str, int], theirs: Mapping[str, int]) -> list[str]:
    """Names whose digests differ or that only one side has, sorted."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
