"""The refit message: which tensors one version of the weights consists of, where their bytes lie, and what is refused.

A message describes one whole version for all engine ranks; the bytes travel beside it, in one segment per engine rank
(`shm.py`). A version may come in several chunks that reuse the segments: every message carries the full list of slots,
so the engine can refuse a version that is incomplete or wrong before the first byte of its memory changes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jetrl_conversion.layout import Layout, local_shapes, pieces
from jetrl_conversion.model_spec import ModelSpec
from jetrl_kernels.formats import scale_shape

SCALE_SUFFIX = "_scale_inv"
"""A quantized parameter `X.weight` has its scales in `X.weight_scale_inv`, in Hugging Face folders and in vLLM."""

PLACED = "placed"
"""A message's segment of an engine rank whose bytes are already in its parameters; see `Engine.expose`."""

ALIGN = 256
"""Every slot starts at a multiple of this many bytes, enough for any vector load or copy engine."""

DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float32": torch.float32, "bfloat16": torch.bfloat16}


class RefitRefused(ValueError):
    """A message that the engine will not load. `problems` holds one line for each violation; memory is unchanged."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("refit refused: " + "; ".join(self.problems))

    def __reduce__(self):
        return RefitRefused, (self.problems,)


@dataclass(frozen=True)
class TensorSlot:
    """One local parameter of one engine rank, `shape` contiguous elements from `offset` on in its chunk's segment."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    chunk: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class RefitMessage:
    """One chunk of one version.

    Args:
        version: number of the weights, one more than the engine's current one (any number for its first).
        scales: scale policy of the FP8 tensors; `none` if there are none.
        segments: path of each engine rank's segment (`shm.py`, `ipc.py`), or `PLACED`.
        slots: for each engine rank, every parameter of the version.
        chunk, chunks: which part of the slots lies in the segments now.
    """

    version: int
    scales: str
    segments: tuple[str, ...]
    slots: tuple[tuple[TensorSlot, ...], ...]
    chunk: int = 0
    chunks: int = 1

    @property
    def repeatable(self) -> bool:
        """Whether the bytes are still there for an engine that has to be started again."""
        return self.chunks == 1 and PLACED not in self.segments

    def to_dict(self) -> dict[str, Any]:
        """Plain values, a slot as a row of its fields: every chunk of a version carries hundreds of them."""
        slots = [[(s.name, s.dtype, s.shape, s.offset, s.chunk) for s in rank] for rank in self.slots]
        return {**vars(self), "slots": slots}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RefitMessage:
        slots = tuple(
            tuple(TensorSlot(name, dtype, tuple(shape), offset, chunk) for name, dtype, shape, offset, chunk in rank)
            for rank in values["slots"]
        )
        return RefitMessage(**{**values, "segments": tuple(values["segments"]), "slots": slots})

    def same_version(self, other: RefitMessage) -> bool:
        """Whether `other` is another chunk of this very version."""
        return (self.version, self.scales, self.slots, self.chunks) == (
            other.version, other.scales, other.slots, other.chunks
        )  # fmt: skip


def fp8_parameters(spec: ModelSpec, layout: Layout, rank: int, quantized: Collection[str]) -> set[str]:
    """Local parameters of an engine rank that are FP8.

    Args:
        quantized: Hugging Face names of the FP8 tensors (`jetrl_conversion.planner.quantized_tensors`).

    Raises:
        ValueError: a fused parameter of which only a part is FP8 (all listed).
    """
    parts: dict[str, dict[str, bool]] = {}
    for piece in pieces(spec, layout, rank):
        parts.setdefault(piece.local_name, {})[piece.hf_name] = piece.hf_name in quantized
    torn = [name for name, held in parts.items() if len(set(held.values())) > 1]
    if torn:
        raise ValueError("only a part is FP8: " + "; ".join(f"{name} {parts[name]}" for name in torn))
    return {name for name, held in parts.items() if all(held.values())}


def plan_slots(
    spec: ModelSpec, layout: Layout, rank: int, quantized: Collection[str], chunks: int = 1
) -> tuple[TensorSlot, ...]:
    """Slots of every parameter of engine rank `rank`, vocabulary padding included (its bytes are zero).

    Trainer ranks and engine compute the same slots by themselves. With `chunks` > 1 the parameters are cut into that
    many runs of about equal size, in turn at the beginning and at the end of the segment: one is read while the next
    arrives.
    """
    fp8 = fp8_parameters(spec, layout, rank, quantized)
    wanted: list[tuple[str, str, tuple[int, ...]]] = []
    for name, shape in local_shapes(spec, layout, rank).items():
        if name in fp8:
            wanted.append((name, "float8_e4m3fn", shape))
            stacked, matrix = shape[:-2], shape[-2:]  # experts are stacked in 3-D
            wanted.append((name + SCALE_SUFFIX, "float32", (*stacked, *scale_shape(*matrix))))
        else:
            wanted.append((name, "bfloat16", shape))
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in wanted]
    per_chunk = sum(sizes) / chunks
    slots, done, chunk, offset = [], 0, 0, 0
    for (name, dtype, shape), size in zip(wanted, sizes):
        if done >= (chunk + 1) * per_chunk and chunk + 1 < chunks:
            chunk, offset = chunk + 1, 0
        slots.append(TensorSlot(name, dtype, shape, offset, chunk))
        done += size
        offset = -(-(offset + size) // ALIGN) * ALIGN
    sizes = [segment_bytes(s for s in slots if s.chunk == c) for c in range(chunk + 1)]
    sizes = [-(-size // ALIGN) * ALIGN for size in sizes]
    end = max((a + b for a, b in itertools.pairwise(sizes)), default=0)
    return tuple(replace(s, offset=s.offset + (end - sizes[s.chunk] if s.chunk % 2 else 0)) for s in slots)


def segment_bytes(slots: Iterable[TensorSlot]) -> int:
    """Size of a segment for these slots, of which one chunk at a time lies there, or two that follow each other."""
    return max((slot.offset + slot.nbytes for slot in slots), default=0)


def check_slots(
    slots: Sequence[TensorSlot], expected: Mapping[str, tuple[str, tuple[int, ...]]], chunks: int
) -> list[str]:
    """Everything in which `slots` differ from the engine's live parameters (name -> dtype, shape)."""
    problems = []
    for name, times in Counter(slot.name for slot in slots).items():
        if times > 1:
            problems.append(f"{name}: in the message {times} times")
    given = {slot.name: slot for slot in slots}
    for name in expected:
        if name not in given:
            problems.append(f"{name}: missing")
    for name, slot in given.items():
        if name not in expected:
            problems.append(f"{name}: the engine has no such parameter{_near(name, expected)}")
        elif (slot.dtype, slot.shape) != expected[name]:
            dtype, shape = expected[name]
            problems.append(f"{name}: {slot.dtype} {list(slot.shape)}, the engine holds {dtype} {list(shape)}")
        elif not 0 <= slot.chunk < chunks:
            problems.append(f"{name}: in chunk {slot.chunk} of {chunks}")
    by_chunk = sorted((s.chunk, s.offset, s.nbytes, s.name) for s in slots if s.dtype in DTYPES)
    for (chunk, start, size, name), (next_chunk, next_start, _, next_name) in itertools.pairwise(by_chunk):
        if chunk == next_chunk and next_start < start + size:
            problems.append(f"{next_name}: its bytes overlap those of {name}")
    return problems


def _near(name: str, expected: Iterable[str]) -> str:
    import difflib

    # Same module first: the usual fault is a wrong suffix, not a wrong layer.
    siblings = [e for e in expected if e.rpartition(".")[0] == name.rpartition(".")[0]] or list(expected)
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_version(message: RefitMessage, current: int | None, scales: str, ranks: int) -> list[str]:
    """What is wrong with a message's header, seen from an engine at version `current` (None: it has no weights yet)."""
    problems = []
    if current is not None and message.version != current + 1:
        problems.append(f"version {message.version}, but the engine is at {current} and takes {current + 1} next")
    if message.version < 0:
        problems.append(f"version {message.version} is negative")
    if message.scales != scales:
        problems.append(f"scale policy {message.scales!r}, but the engine quantizes activations by {scales!r}")
    if not 0 <= message.chunk < message.chunks:
        problems.append(f"chunk {message.chunk} of {message.chunks}")
    if len(message.segments) != ranks or len(message.slots) != ranks:
        problems.append(
            f"{len(message.segments)} segments and {len(message.slots)} slot lists for {ranks} engine ranks"
        )
    return problems
