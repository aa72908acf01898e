"""The safetensors file format, read and written by hand: 8 bytes of length, a JSON header, then raw data.

Format: https://huggingface.co/docs/safetensors. Doing it here allows checks that name the file and the tensor, files
allocated before they are filled, and slices written by several processes.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from jetrl_conversion.disk import writing
from jetrl_conversion.errors import CheckpointError

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100 << 20


class Entry(NamedTuple):
    """One tensor in a file: `offset` counts from the start of the file, `nbytes` is its length."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, Entry]:
    """Tensors of one safetensors file.

    Raises:
        CheckpointError: file missing, cut, with a broken header, with gaps or overlaps, or with a dtype we do not read.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(f"{file}: cut or not safetensors: {size} bytes, header of {length} announced")
            raw = handle.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        entries = {name: _entry(file, name, item, 8 + length) for name, item in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: broken header ({error})") from None
    at = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != at:
            raise CheckpointError(f"{file}: {name} starts at byte {entry.offset}, {at} expected (gap or overlap)")
        at += entry.nbytes
    if at != size:
        raise CheckpointError(f"{file}: {size} bytes, its header describes {at}" + (" (cut)" if size < at else ""))
    return entries


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate tensor {next(name for name in names if names.count(name) > 1)}")
    return found


def _entry(file: Path, name: str, item: dict, base: int) -> Entry:
    if item["dtype"] not in DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {item['dtype']}; readable are {', '.join(DTYPES)}")
    dtype, shape, (begin, end) = DTYPES[item["dtype"]], tuple(item["shape"]), item["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise CheckpointError(f"{file}: {name} has shape {shape}, offsets {begin}..{end}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{file}: {name} has {end - begin} bytes, shape {list(shape)} of {item['dtype']} needs "
                              f"{math.prod(shape) * dtype.itemsize}")  # fmt: skip
    return Entry(dtype, shape, base + begin, end - begin)


def create_file(file: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Entry]:
    """Write a header and reserve the disk space of all its tensors; return where each goes.

    Raises:
        OSError: the disk is full (found now, not half-way); says what is needed and free.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 64 + 56)  # data starts at a multiple of 64 bytes
    base = 8 + len(raw)
    with writing(file, base + at), file.open("wb") as handle:
        handle.write(len(raw).to_bytes(8, "little") + raw)
        handle.flush()
        os.posix_fallocate(handle.fileno(), 0, base + at)
    entries, at = {}, base
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        entries[name] = Entry(dtype, shape, at, nbytes)
        at += nbytes
    return entries
