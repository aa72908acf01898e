"""Digests of live parameters by Hugging Face name, the same number from any layout.

Both sides call this on the memory that their next forward pass reads: the trainer with its Megatron layout, the engine
with its vLLM layout. Digests of the shards of one tensor add up modulo 2**64, so ranks report and `merge_digests` sums.
A replica (a norm on every tensor-parallel rank, the second copy of a tied embedding) is digested as a copy of its own
and must equal the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_conversion.layout import Layout, pieces
from jetrl_conversion.model_spec import ModelSpec
from jetrl_kernels.digest import combine, digest_tensor
from jetrl_kernels.formats import BLOCK
from jetrl_megatron.refit.message import SCALE_SUFFIX
from jetrl_megatron.refit.rectangles import cut


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
        self._runs: dict[str, list[_Run]] = {}
        self._places: list[tuple] = []

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
            self._runs, self._places = self._of(found), places
        # One wait for the device, not one for each part.
        parts = [run.digest() for runs in self._runs.values() for run in runs]
        values = iter(torch.stack(parts).tolist() if parts else ())
        return {name: combine([next(values) for _ in runs]) for name, runs in self._runs.items()}

    def _of(self, parameters: Mapping[str, Tensor]) -> dict[str, list[_Run]]:
        runs: dict[str, list[_Run]] = {}
        for piece, copy in self._pieces:
            tensor = parameters.get(piece.local_name)
            if tensor is None:
                raise KeyError(f"{piece.local_name}: no such parameter on {self.where}")
            suffix = f"#{copy}" if copy else ""
            place = (piece.local_start, piece.size, piece.hf_start, self._shapes[piece.hf_name])
            _add(runs.setdefault(piece.hf_name + suffix, []), tensor, *place)
            scales = parameters.get(piece.local_name + SCALE_SUFFIX)
            if scales is not None:
                if any(start % BLOCK for start in (*piece.local_start, *piece.hf_start)):
                    raise ValueError(f"{piece.hf_name}: {piece} does not start on the {BLOCK}x{BLOCK} grid")
                tiles = (tuple(-(-n // BLOCK) for n in pair) for pair in place)
                _add(runs.setdefault(piece.hf_name + SCALE_SUFFIX + suffix, []), scales, *tiles)
        return runs


@dataclass
class _Run:
    """Blocks of one tensor that follow each other row by row in the global tensor: one digest for all of them.

    Megatron interleaves q, k and v by KV group; a digest for each block would be a kernel launch for each.
    """

    hf: tuple[int, ...]
    shape: tuple[int, ...]
    blocks: list[Tensor]
    end: int

    def digest(self) -> Tensor:
        block = self.blocks[0]
        if len(self.blocks) > 1:
            block = torch.cat([b.view(torch.uint8) for b in self.blocks]).view(block.dtype)
        if block.dim() == 1:  # one row to the digest, a column of n x 1 to the layout
            return digest_tensor(block, col0=self.hf[0], global_cols=self.shape[0])
        return digest_tensor(block, row0=self.hf[0], col0=self.hf[1], global_cols=self.shape[1])


def _add(
    runs: list[_Run],
    tensor: Tensor,
    at: tuple[int, ...],
    size: tuple[int, ...],
    hf: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    """Add the `size` block at `at` of a local tensor, at its place `hf` in the global tensor of `shape`."""
    block = cut(tensor, at, size)  # type: ignore[arg-type]
    last = runs[-1] if runs else None
    if last is not None and (last.end, last.hf[1], last.blocks[0].shape[1:]) == (hf[0], hf[1], block.shape[1:]):
        last.blocks.append(block)
        last.end += size[0]
    else:
        runs.append(_Run(hf, shape, [block], hf[0] + size[0]))


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
