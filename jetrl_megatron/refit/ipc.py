"""Weights by CUDA IPC: the engine maps the trainer's own buffers and copies rectangles out of them, in place.

Nothing is staged. A trainer rank writes a table once: where its tensors lie (CUDA IPC handles of their storages) and
which rectangle of which tensor goes where in each engine rank. The engine opens the handles once and repeats the copies
at every refit, because neither side's storage ever moves. A table is a small JSON file of this user, not a pickle.

The other way round an engine that never sleeps writes a table of its parameters, and the process that receives for it
puts bytes there.
"""

from __future__ import annotations

import base64
import bisect
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.refit.message import TensorSlot
from jetrl_megatron.refit.rectangles import Part, cut
from jetrl_megatron.refit.shm import PREFIX as FILE_PREFIX
from jetrl_megatron.refit.shm import SegmentError, remove_stale, segment_folder, slot_view

PREFIX = "cuda-ipc:"
"""A message's segment `cuda-ipc:TABLE[,TABLE...]` names the tables of the trainer ranks that feed this engine rank."""

SEGMENT = "cuda-segment:"
"""A message's segment `cuda-segment:TABLE` names a buffer on a GPU, laid out in slots like one in shared memory."""


def device_uuid(index: int) -> str:
    """Name of a GPU that is the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(index).uuid)


class Exporter:
    """One trainer rank's table. `references` keeps it up to date; `close` removes it.

    Args:
        copies: for each engine rank, what this trainer rank contributes.
        label: part of the file's name.
    """

    def __init__(self, copies: Sequence[Sequence[Part]], label: str):
        self.copies, self.label = copies, label
        self.path: Path | None = None
        self._places: dict[str, int] = {}

    def table(self, tensors: Mapping[str, Tensor]) -> Path:
        """The table of these tensors, written anew only if one of them has moved."""
        used = {name for rank in self.copies for name, *_ in rank}
        places = {name: tensors[name].data_ptr() for name in sorted(used)}
        if self.path is None or places != self._places:
            self.close()
            self.path = publish({name: tensors[name] for name in places}, self.label, self.copies)
            self._places = places
        return self.path

    def close(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


class CudaSegment:
    """`nbytes` of GPU memory that engines of this node map; `view` and `unlink` as of `shm.Segment`."""

    def __init__(self, path: Path | str, memory: Tensor, table: Path | None = None):
        self.path, self.bytes, self._table = path, memory, table

    @staticmethod
    def create(nbytes: int, device: torch.device) -> CudaSegment:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        table = publish({"bytes": memory}, "landing")
        return CudaSegment(f"{SEGMENT}{table}", memory, table)

    @staticmethod
    def attach(path: str) -> CudaSegment:
        """Raises SegmentError: no such table, or its GPU cannot be reached."""
        return CudaSegment(path, published(path.removeprefix(SEGMENT))["bytes"])

    def view(self, slot: TensorSlot) -> Tensor:
        """Raises SegmentError: the slot reaches beyond the segment."""
        return slot_view(self.bytes, slot, self.path)

    def unlink(self) -> None:
        if self._table is not None:
            self._table.unlink(missing_ok=True)


def publish(tensors: Mapping[str, Tensor], label: str, copies: Sequence[Sequence[Part]] = ()) -> Path:
    """Write a table: where the tensors of this process lie, all on one GPU, and what other processes copy from them.

    The tensors must stay where they are as long as somebody has opened the table.

    Args:
        label: part of the file's name.
        copies: for each engine rank, what it copies.
    """
    numbers: dict[int, int] = {}
    storages, entries = [], {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in numbers:
            numbers[key] = len(storages)
            storages.append([_to_json(field) for field in storage._share_cuda_()])
        entries[name] = {
            "storage": numbers[key],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "offset": tensor.storage_offset(),
        }
    device = device_uuid(next(iter(tensors.values())).device.index or 0)
    return _save({"device": device, "storages": storages, "tensors": entries, "copies": copies}, label)


def published(table: Path | str) -> dict[str, Tensor]:
    """Tensors over another process's memory, by the names in its table.

    Raises:
        SegmentError: no such table, or its GPU cannot be reached.
    """
    return _open(Path(table))[0]


def _save(table: dict[str, Any], label: str) -> Path:
    remove_stale()
    path = segment_folder() / f"{FILE_PREFIX}{os.getpid()}-{os.urandom(4).hex()}-{label}.json"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(table, file)
    return path


class Importer:
    """An engine rank's side: opens tables once, and gives the copies of a refit as pairs of views."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[dict[str, Tensor], list[list[list[Any]]]]] = {}
        self._last: tuple[object, list[tuple[Tensor, Tensor]]] = (None, [])

    def pairs(self, segment: str, rank: int, live: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(target, source) views of equal shape and dtype, to be copied in order.

        Args:
            segment: as in `RefitMessage.segments`. live: this engine rank's parameters.

        Raises:
            SegmentError: a table that cannot be read or opened, or a copy that fits neither side (all listed).
        """
        # Thousands of views, the same at every refit as long as nothing moves.
        key = (segment, rank, tuple((name, p.data_ptr(), p.shape) for name, p in live.items()))
        if self._last[0] == key:
            return self._last[1]
        paths = segment.removeprefix(PREFIX).split(",")
        for path in [p for p in self._tables if p not in paths]:
            del self._tables[path]
        found, problems = [], []
        for path in paths:
            if path not in self._tables:
                self._tables[path] = _open(Path(path))
            tensors, copies = self._tables[path]
            for source_name, source_at, size, target_name, target_at in copies[rank]:
                if target_name not in live:
                    problems.append(f"{target_name}: the engine has no such parameter")
                    continue
                source = cut(tensors[source_name], source_at, size)
                target = cut(live[target_name], target_at, size)
                if source.shape != target.shape or source.dtype != target.dtype:
                    problems.append(
                        f"{target_name} at {target_at}: {source.dtype} {list(source.shape)} from {source_name}, "
                        f"the engine holds {target.dtype} {list(target.shape)}"
                    )
                found.append((target, source))
        if problems:
            raise SegmentError("; ".join(problems))
        self._last = key, found
        return found


def uncovered(pairs: Sequence[tuple[Tensor, Tensor]], live: Mapping[str, Tensor]) -> list[str]:
    """Parameters of which the copies leave a part untouched (padding of the vocabulary): they are zeroed once."""
    storages = {p.data_ptr(): name for name, p in live.items()}
    written = dict.fromkeys(live, 0)
    starts = sorted(storages)
    for target, _ in pairs:
        written[storages[starts[bisect.bisect_right(starts, target.data_ptr()) - 1]]] += target.numel()
    return [name for name, count in written.items() if count < live[name].numel()]


def _to_json(field: Any) -> Any:
    return {"bytes": base64.b64encode(field).decode()} if isinstance(field, bytes) else field


def _from_json(field: Any) -> Any:
    return base64.b64decode(field["bytes"]) if isinstance(field, dict) else field


def _open(path: Path) -> tuple[dict[str, Tensor], list[list[list[Any]]]]:
    """Tensors over the trainer's memory, and its copies by engine rank."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise SegmentError(f"table {path}: {error.strerror}") from error
    with os.fdopen(fd) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise SegmentError(f"table {path}: not a file of this user")
        table = json.load(file)
    torch.cuda.init()
    # Mapped for this process's own GPU, wherever the memory is: its kernels then read and write over NVLink. torch's
    # copies between devices run on the source's GPU, which cannot reach the memory of an engine that can sleep.
    device = torch.cuda.current_device()
    try:
        storages = [
            torch.UntypedStorage._new_shared_cuda(device, *[_from_json(f) for f in fields][1:])
            for fields in table["storages"]
        ]
    except RuntimeError as error:
        raise SegmentError(
            f"table {path}: GPU {table['device']} cannot be reached from {device_uuid(device)}: {error}"
        ) from error
    tensors = {}
    for name, entry in table["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        empty = torch.empty(0, dtype=dtype, device=f"cuda:{device}")
        tensors[name] = empty.set_(storages[entry["storage"]], entry["offset"], entry["shape"], entry["stride"])
    return tensors, table["copies"]
