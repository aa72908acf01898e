"""The files of a torch distributed checkpoint (`torch_dist`), read by slices and written in a stream.

A folder holds `.metadata` (a pickle: each tensor's shape, dtype and chunks, and where each chunk lies), `metadata.json`
(Megatron's format version) and `*.distcp` files: one torch archive after another, one for each chunk. Chunks may be cut
anyhow: torch and Megatron fetch what overlaps with the shard that they load. Nothing here starts a process group.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import pickle
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from jetrl_conversion.disk import require_room, writing
from jetrl_conversion.errors import CheckpointError, ConversionError
from jetrl_conversion.safe_pickle import check_metadata
from jetrl_conversion.safetensors_io import PartialFolder

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


class Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


class TorchDistReader:
    """Tensors of a distributed checkpoint, read without loading whole ones.

    Attributes: `tensors` (key -> (dtype, shape)).

    Raises:
        CheckpointError: not a torch_dist folder, or `check_metadata` found something.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder")
        self._check_format()
        metadata = check_metadata(self.path)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._chunks: dict[str, list[Chunk]] = {}
        places = {(i.fqn, None if i.offset is None else tuple(i.offset)): info
                  for i, info in metadata.storage_data.items()}  # fmt: skip
        problems = []
        for key, item in metadata.state_dict_metadata.items():
            if not hasattr(item, "chunks"):
                continue
            self.tensors[key] = (item.properties.dtype, tuple(item.size))
            self._chunks[key] = []
            for chunk in item.chunks:
                info = places.get((key, tuple(chunk.offsets))) or places.get((key, None))
                if info is None:
                    problems.append(f"{self.path / '.metadata'}: no file is named for {key} at {tuple(chunk.offsets)}")
                    continue
                self._chunks[key].append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), self.path / info.relative_path,
                                               info.offset, info.length))  # fmt: skip
        if problems:
            raise CheckpointError(problems)
        self._last = threading.local()

    def _check_format(self) -> None:
        file = self.path / "metadata.json"
        try:
            found = json.loads(file.read_text())
            backend = found["sharded_backend"]
        except FileNotFoundError:
            raise CheckpointError(f"{file}: no such file; {self.path} is not a Megatron checkpoint") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: broken ({error})") from None
        if backend != FORMAT["sharded_backend"]:
            raise CheckpointError(f"{file}: format {backend!r}; only torch_dist is read")

    def read(self, key: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """A box of tensor `key`, put together from the chunks that it touches.

        Raises:
            CheckpointError: no such tensor, or a chunk that is not the torch archive that `.metadata` promises.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor {key}")
        dtype, _ = self.tensors[key]
        out = None
        for chunk in self._chunks[key]:
            low = [max(a, b) for a, b in zip(start, chunk.offsets)]
            high = [min(a + n, b + m) for a, n, b, m in zip(start, size, chunk.offsets, chunk.sizes)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            data = self._load(key, chunk, dtype)
            data = data[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets))]
            if data.shape == torch.Size(size):
                return data
            if out is None:
                out = torch.empty(size, dtype=dtype)
            out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start))] = data
        if out is None:
            raise CheckpointError(f"{self.path}: {key} has no data at {start}")
        return out

    def _load(self, key: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """The chunk's tensor. Each thread keeps its last one: neighbouring reads ask for it again."""
        last = getattr(self._last, "item", None)
        if last is not None and last[0] == (chunk.file, chunk.start):
            return last[1]
        self._last.item = None
        with chunk.file.open("rb") as handle:
            handle.seek(chunk.start)
            raw = io.BytesIO(handle.read(chunk.nbytes))
        try:
            data = torch.load(raw, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a broken or hostile archive
            raise CheckpointError(f"{chunk.file}: {key} at {chunk.offsets}: {type(error).__name__}: "
                                  f"{str(error).splitlines()[0]}") from None  # fmt: skip
        if not isinstance(data, torch.Tensor) or tuple(data.shape) != chunk.sizes or data.dtype != dtype:
            raise CheckpointError(f"{chunk.file}: {key} at {chunk.offsets} is not {chunk.sizes} of {dtype}")
        self._last.item = ((chunk.file, chunk.start), data)
        return data


class TorchDistWriter:
    """Writes a distributed checkpoint chunk by chunk, from several threads. Use as a context manager.

    Args:
        path: final folder; must not exist.
        tensors: key -> (dtype, shape); chunks must cover each once.
        objects: key -> value of Megatron's ShardedObjects, stored as `[value]`.
        lanes: number of data files; calls with different lanes may run at the same time.

    Raises:
        ConversionError: as `PartialFolder`.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        *,
        objects: Mapping[str, Any],
        lanes: int = 1,
    ):
        self.folder = PartialFolder(path)
        self.tensors = dict(tensors)
        self._parts: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {key: [] for key in tensors}
        self._storage: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
        self._lock = threading.Lock()
        try:
            paths = [self.folder.path / f"__{n}_0.distcp" for n in range(lanes)]
            self._files: list[BinaryIO] = [path.open("wb", buffering=0) for path in paths]
            self._lane_locks = [threading.Lock() for _ in range(lanes)]
            require_room(self.folder.final, sum(math.prod(s) * dtype.itemsize for dtype, s in tensors.values()))
            self._objects = list(objects)
            for key, value in objects.items():
                self._append(0, key, None, [value])
        except BaseException:
            self.folder.discard()
            raise

    def write(self, lane: int, key: str, offsets: tuple[int, ...], tensor: torch.Tensor) -> None:
        """Store a chunk. `tensor` has as many dimensions as the whole and the declared dtype."""
        dtype, shape = self.tensors[key]
        fits = all(o + n <= whole for o, n, whole in zip(offsets, tensor.shape, shape))
        if tensor.dtype != dtype or tensor.dim() != len(shape) or not fits:
            raise ConversionError(f"{key}: chunk {list(tensor.shape)} {tensor.dtype} at {offsets} does not fit "
                                  f"{list(shape)} {dtype}")  # fmt: skip
        # torch.save writes a tensor's whole storage: give it one of its own.
        own = (
            tensor if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        )
        self._append(lane, key, offsets, own)
        with self._lock:
            self._parts[key].append((tuple(offsets), tuple(tensor.shape)))

    def _append(self, lane: int, key: str, offsets: tuple[int, ...] | None, value: Any) -> None:
        with self._lane_locks[lane]:
            file = self._files[lane]
            start = file.tell()
            tail = _Tail(file, start)
            try:
                torch.save(value, tail)
            except (OSError, RuntimeError):  # torch wraps the error of a write in one of its own
                if tail.error is None:
                    raise
                with writing(Path(file.name)):
                    raise tail.error from None
            end = file.seek(0, io.SEEK_END)
        with self._lock:
            self._storage[(key, offsets)] = (f"__{lane}_0.distcp", start, end - start)

    def commit(self) -> None:
        """Write the metadata, check that every tensor is covered, and give the folder its final name."""
        try:
            for file in self._files:
                file.close()
            problems = []
            for key, (_, shape) in self.tensors.items():
                got = sum(math.prod(sizes) for _, sizes in self._parts[key])
                if got != math.prod(shape):
                    problems.append(f"{self.folder.final}: {key}: {got} of {math.prod(shape)} elements written")
            if problems:
                raise ConversionError(problems)
            with writing(self.folder.final):
                with (self.folder.path / ".metadata").open("wb") as handle:
                    pickle.dump(self._metadata(), handle)
                (self.folder.path / "metadata.json").write_text(json.dumps(FORMAT))
            self.folder.commit()
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # a full disk: what is still buffered is not wanted any more
                file.close()
        self.folder.discard()

    def _metadata(self) -> Any:
        from torch.distributed.checkpoint import filesystem
        from torch.distributed.checkpoint import metadata as md

        entries: dict[str, Any] = {}
        for key, (dtype, shape) in self.tensors.items():
            chunks = [md.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in sorted(self._parts[key])]
            entries[key] = md.TensorStorageMetadata(md.TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        entries.update({key: md.BytesStorageMetadata() for key in self._objects})
        storage = {
            md.MetadataIndex(key, None if offsets is None else torch.Size(offsets)): filesystem._StorageInfo(*place)
            for (key, offsets), place in self._storage.items()
        }
        return md.Metadata(state_dict_metadata=entries, storage_data=storage, storage_meta=md.StorageMeta())

    def __enter__(self) -> TorchDistWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self._discard()


class _Tail(io.RawIOBase):
    """The end of a file as a file of its own, since a torch archive counts its positions from its start."""

    def __init__(self, file: BinaryIO, start: int):
        self._file, self._start = file, start
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error
            raise
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + self._start if whence == io.SEEK_SET else offset
        return self._file.seek(at, whence) - self._start

    def flush(self) -> None:
        self._file.flush()


def split_rows(rows: int, row_bytes: int, limit: int = 64 << 20, multiple: int = 1) -> Iterable[tuple[int, int]]:
    """(start, count) of runs of rows of at most `limit` bytes each, in multiples of `multiple` where it can be."""
    step = max(1, limit // max(1, row_bytes) // multiple) * multiple
    for start in range(0, rows, step):
        yield start, min(step, rows - start)
