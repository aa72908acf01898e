"""Are two checkpoints the same model, to the bit? Digests per tensor, whatever the two are stored as."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from jetrl_conversion.convert import RUN_BYTES
from jetrl_conversion.jobs import Job, run_jobs
from jetrl_conversion.safetensors_io import SCALE_SUFFIX
from jetrl_conversion.sources import HFSource, Source
from jetrl_conversion.torch_dist import split_rows
from jetrl_kernels.digest import digest
from jetrl_kernels.formats import BLOCK

_MASK = (1 << 64) - 1


@dataclass
class Difference:
    """One tensor that differs. `row`, `col`: the first element that does, `a` and `b` its values there."""

    name: str
    elements: int
    row: int
    col: int
    a: float
    b: float
    max_abs: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.elements} elements differ, by at most {self.max_abs:.6g}; the first at row "
            f"{self.row}, column {self.col}: {self.a:.9g} and {self.b:.9g}"
        )


@dataclass
class Comparison:
    """What `compare` found. Equal if both lists are empty."""

    digests: dict[str, tuple[int, int]] = field(default_factory=dict)
    structure: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    first: Difference | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.structure and not self.different


def compare(a: Source, b: Source) -> Comparison:
    """Digest every tensor of both. FP8 against FP8 compares codes and scales; FP8 against BF16 the dequantized values.

    Names, shapes, dtypes and scale policies that differ are reported in `structure`; `first` describes the first
    tensor, in checkpoint order, whose bytes differ.
    """
    found = Comparison()
    tensors_a, tensors_b = a.spec.tensors(), b.spec.tensors()
    for name in tensors_a.keys() | tensors_b.keys():
        if name not in tensors_b or name not in tensors_a:
            found.structure.append(f"{name} is only in {a.path if name in tensors_a else b.path}")
        elif tensors_a[name].shape != tensors_b[name].shape:
            shapes = f"{list(tensors_a[name].shape)} and {list(tensors_b[name].shape)}"
            found.structure.append(f"{name} has shapes {shapes}")
    if a.policy and b.policy and a.policy != b.policy:
        found.structure.append(f"scale policies differ: {a.policy} and {b.policy}")
    names = [n for n in tensors_a if n in tensors_b and tensors_a[n].shape == tensors_b[n].shape]
    mixed = [n for n in names if (n in a.fp8) != (n in b.fp8)]
    if mixed:
        found.notes.append(f"{len(mixed)} tensors are FP8 on one side only: their dequantized values are compared")
    found.structure += [
        f"{n} is {a.dtype(n)} and {b.dtype(n)}" for n in names if n not in a.fp8 | b.fp8 and a.dtype(n) != b.dtype(n)
    ]
    found.structure.sort()
    found.digests = _digests(a, b, names, set(mixed))
    found.different = [name for name, (x, y) in found.digests.items() if x != y]
    if found.different:
        found.first = _difference(a, b, found.different[0])
    return found


def _digests(a: Source, b: Source, names: list[str], mixed: set[str]) -> dict[str, tuple[int, int]]:
    """Name -> digests of both sides; FP8 tensors have one name for codes and one for scales."""
    sums: dict[str, list[int]] = {}
    lock, jobs = threading.Lock(), list[Job]()
    for name in names:
        fp8 = name in a.fp8 and name not in mixed
        for key in [name, name + SCALE_SUFFIX] if fp8 else [name]:
            sums[key] = [0, 0]
        shape = a.spec.tensors()[name].shape
        row_bytes = math.prod(shape[1:]) * 2
        for row, rows in split_rows(shape[0], row_bytes, RUN_BYTES, BLOCK):
            for side, source in enumerate((a, b)):
                jobs.append((_digest_job(source, side, name, row, rows, fp8, sums, lock), rows * row_bytes))
    run_jobs(jobs, "digesting")
    return {name: (pair[0] & _MASK, pair[1] & _MASK) for name, pair in sums.items()}


def _digest_job(source: Source, side: int, name: str, row: int, rows: int, fp8: bool, sums: dict[str, list[int]],
                lock: Any):  # fmt: skip
    def work() -> None:
        if fp8 and isinstance(source, HFSource):
            codes, scale = source.codes(name, row, rows)
            parts = {name: digest(codes, row0=row), name + SCALE_SUFFIX: digest(scale, row0=row // BLOCK)}
        else:
            parts = {name: digest(source.read(name, row, rows), row0=row)}
        with lock:
            for key, value in parts.items():
                sums[key][side] += value

    return work


def _difference(a: Source, b: Source, key: str) -> Difference:
    """Where and by how much one tensor differs."""
    name = key.removesuffix(SCALE_SUFFIX)
    both = isinstance(a, HFSource) and isinstance(b, HFSource) and name in a.fp8 and name in b.fp8
    shape = a.spec.tensors()[name].shape
    found: Difference | None = None
    for row, rows in split_rows(shape[0], math.prod(shape[1:]) * 2, RUN_BYTES, BLOCK):
        if both:
            which, row0 = (1, row // BLOCK) if key != name else (0, row)
            x, y = a.codes(name, row, rows)[which], b.codes(name, row, rows)[which]  # type: ignore[union-attr]
        else:
            x, y, row0 = a.read(name, row, rows), b.read(name, row, rows), row
        unlike = _bits(x) != _bits(y) if x.dtype == y.dtype else x.float() != y.float()
        if not bool(unlike.any()):
            continue
        at = unlike.nonzero()[0].tolist()
        worst = float((x.double() - y.double()).abs().max())
        if found is None:
            found = Difference(key, 0, row0 + at[0], at[1], float(x[tuple(at)]), float(y[tuple(at)]), 0.0)
        found.elements += int(unlike.sum())
        found.max_abs = max(found.max_abs, worst)
    assert found is not None, f"{key}: digests differ, elements do not"
    return found


def _bits(x: torch.Tensor) -> torch.Tensor:
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(size)
