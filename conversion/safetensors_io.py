"""Model folders as Hugging Face writes them: read by slices without loading, written by several processes at once.

A folder under its final name is always complete: writing goes to `.NAME.partial` beside it, and one rename ends it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from jetrl_conversion.disk import writing
from jetrl_conversion.errors import CheckpointError, ConversionError
from jetrl_conversion.model_spec import ModelSpec, load_model_spec, read_config
from jetrl_conversion.safetensors_header import DTYPE_NAMES, Entry, create_file, read_header

INDEX = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
SIDE_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model", "chat_template.jinja",
              "chat_template.json", "LICENSE")  # fmt: skip


class HFFolderReader:
    """A model folder, validated when opened: index against shards, sizes, duplicates, headers.

    Attributes: `config` (dict), `entries` (name -> Entry), `files` (name -> shard file).

    Raises:
        CheckpointError: everything that is wrong with the folder, one line each.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder")
        self.config: dict[str, Any] = read_config(self.path)
        self.entries: dict[str, Entry] = {}
        self.files: dict[str, Path] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()
        problems: list[str] = []
        weight_map = self._read_index()
        for file in sorted(set(weight_map.values())) if weight_map is not None else [self.path / "model.safetensors"]:
            try:
                header = read_header(file)
            except CheckpointError as error:
                problems += error.problems
                continue
            for name, entry in header.items():
                if name in self.entries:
                    problems.append(f"{file}: {name} is also in {self.files[name].name} (duplicate)")
                elif weight_map is not None and name not in weight_map:
                    problems.append(f"{file}: holds {name}, which {INDEX} does not list")
                self.entries[name], self.files[name] = entry, file
        broken = {line.split(":")[0] for line in problems}
        for name, file in (weight_map or {}).items():
            if str(file) in broken and name not in self.entries:
                continue  # said already
            if name not in self.entries:
                problems.append(f"{self.path / INDEX}: lists {name}, which no shard holds")
            elif self.files[name] != file:
                problems.append(f"{self.path / INDEX}: {name} is in {self.files[name].name}, not in {file.name}")
        if problems:
            raise CheckpointError(problems)

    def _read_index(self) -> dict[str, Path] | None:
        file = self.path / INDEX
        if not file.is_file():
            return None
        try:
            pairs = json.loads(file.read_text(), object_pairs_hook=_list_duplicates)["weight_map"]
            found = {name: self.path / shard for name, shard in pairs.items()}
            outside = [shard for shard in found.values() if shard.parent != self.path]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: broken index ({error})") from None
        if outside:
            raise CheckpointError(f"{file}: shard {outside[0]} is not in the folder")
        return found

    def spec(self) -> ModelSpec:
        return load_model_spec(self.config)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes with `expected` (name -> shape); raise CheckpointError listing all differences."""
        problems = [f"{self.path}: {name} is missing" for name in expected if name not in self.entries]
        for name, entry in self.entries.items():
            if name not in expected:
                problems.append(f"{self.files[name]}: {name} is not a tensor of this model (extra)")
            elif entry.shape != tuple(expected[name]):
                problems.append(f"{self.files[name]}: {name} has shape {list(entry.shape)}, config.json implies "
                                f"{list(expected[name])}")  # fmt: skip
        if problems:
            raise CheckpointError(problems)

    def read(self, name: str, start: tuple[int, int] = (0, 0), size: tuple[int, int] | None = None) -> torch.Tensor:
        """A rectangle as a 2-D tensor (n x 1 for 1-D tensors). A view of the file: read it, never write to it."""
        whole = self.whole(name)
        table = whole.reshape(whole.shape[0], -1)
        rows, cols = size if size is not None else (table.shape[0] - start[0], table.shape[1] - start[1])
        return table[start[0] : start[0] + rows, start[1] : start[1] + cols]

    def whole(self, name: str) -> torch.Tensor:
        """The tensor in its own shape, as a view of the file."""
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: no tensor {name}")
        entry, file = self.entries[name], self.files[name]
        with self._lock:
            if file not in self._maps:
                with file.open("rb") as handle:
                    # Private mapping: torch wants a writable buffer; pages stay those of the file unless written to.
                    self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        count = entry.nbytes // entry.dtype.itemsize
        if not count:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.offset % entry.dtype.itemsize:  # other writers do not align; such a tensor is copied
            raw = bytearray(self._maps[file][entry.offset : entry.offset + entry.nbytes])
            return torch.frombuffer(raw, dtype=entry.dtype).view(entry.shape)
        return torch.frombuffer(self._maps[file], dtype=entry.dtype, count=count, offset=entry.offset).view(entry.shape)

    def side_files(self) -> list[Path]:
        """Tokenizer and generation files to carry along. Python files (`trust_remote_code`) never are."""
        return side_files(self.path)


def side_files(folder: Path) -> list[Path]:
    return [folder / name for name in SIDE_FILES if (folder / name).is_file()]


def write_side_files(folder: Path, config: dict[str, Any], files: Iterable[Path]) -> None:
    """config.json and copies of `files`; the folder is made if missing."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in files:
            shutil.copyfile(file, folder / file.name)


def _list_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"{name} is listed twice")
        seen.add(name)
    return dict(pairs)


class PartialFolder:
    """`.NAME.partial` beside the final folder, held by a lock so that an interrupted one is told from a running one.

    Raises:
        ConversionError: the final folder exists, or another process is writing it.
    """

    def __init__(self, final: str | Path):
        self.final = Path(final).absolute()
        if self.final.exists():
            raise ConversionError(f"{self.final}: exists; name a new folder or remove it first")
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self.path = self.final.with_name(f".{self.final.name}.partial")
        lock = self.final.with_name(f".{self.final.name}.lock")
        self._lock_file, self._lock = lock, lock.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConversionError(f"{self.final}: another process is writing it ({lock} is locked)") from None
        if self.path.exists():  # left by a process that was killed: nothing in it is worth keeping
            shutil.rmtree(self.path)
        self.path.mkdir()

    def commit(self) -> None:
        """Give the folder its final name."""
        if self.final.exists():
            raise ConversionError(f"{self.final}: appeared while it was being written")
        os.rename(self.path, self.final)
        self._release()

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if not self._lock.closed:
            self._lock_file.unlink(missing_ok=True)
            self._lock.close()


class HFFolderWriter:
    """Writes a model folder whose tensors are known beforehand. Use as a context manager: it commits or discards.

    Args:
        path: final folder; must not exist.
        tensors: name -> (dtype, shape), in the order in which they are laid out.
        config: written as config.json.
        copy: files copied in as they are. text: name -> text of further files.
        shard_bytes: shards are closed once they reach this size.

    Raises:
        ConversionError, OSError: as `PartialFolder`, and when the disk has no room for all tensors.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        config: dict[str, Any],
        *,
        copy: Iterable[Path] = (),
        text: Mapping[str, str] | None = None,
        shard_bytes: int = 5 << 30,
    ):
        self.folder = PartialFolder(path)
        self.written: dict[str, int] = dict.fromkeys(tensors, 0)
        try:
            self.places = self._create(tensors, shard_bytes)
            write_side_files(self.folder.path, config, copy)
            for name, content in (text or {}).items():
                (self.folder.path / name).write_text(content)
        except BaseException:
            self.folder.discard()
            raise
        self.slots, self._lock = SlotWriter(self.places), threading.Lock()

    def _create(
        self, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], shard_bytes: int
    ) -> dict[str, tuple[str, Entry]]:
        shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
        total = held = 0
        for name, (dtype, shape) in tensors.items():
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            if held and held + nbytes > shard_bytes:
                shards.append({})
                held = 0
            shards[-1][name] = (dtype, tuple(shape))
            held, total = held + nbytes, total + nbytes
        places, weight_map = {}, {}
        for number, shard in enumerate(shards, 1):
            many = len(shards) > 1
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
            for name, entry in create_file(self.folder.path / file, shard).items():
                places[name], weight_map[name] = (str(self.folder.path / file), entry), file
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder.path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return places

    def write(self, name: str, start: tuple[int, int], tensor: torch.Tensor) -> None:
        """Write a rectangle. `tensor` has the declared dtype and is 2-D, or 1-D for 1-D tensors."""
        self.note({name: self.slots.write(name, start, tensor)})

    def note(self, written: Mapping[str, int]) -> None:
        """Count elements that another process wrote through a `SlotWriter`."""
        with self._lock:
            for name, count in written.items():
                self.written[name] += count

    def commit(self) -> None:
        """Give the folder its final name. Raises ConversionError if any tensor was not written once, and only once."""
        self.slots.close()
        problems = []
        for name, (_, entry) in self.places.items():
            count = entry.nbytes // entry.dtype.itemsize
            if self.written[name] != count:
                problems.append(f"{self.folder.final}: {name}: {self.written[name]} of {count} elements written")
        if problems:
            self.folder.discard()
            raise ConversionError(problems)
        self.folder.commit()

    def __enter__(self) -> HFFolderWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.slots.close()
            self.folder.discard()


class SlotWriter:
    """Writes rectangles into files that have their full size, from any thread; another process makes its own from
    `places`."""

    def __init__(self, places: Mapping[str, tuple[str, Entry]]):
        self.places = dict(places)
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()

    def write(self, name: str, start: tuple[int, int], tensor: torch.Tensor) -> int:
        """Write and return the number of elements. Rectangles narrower than the tensor go row by row."""
        file, entry = self.places[name]
        if tensor.dtype != entry.dtype:
            raise ConversionError(f"{name}: {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} written into "
                                  f"{DTYPE_NAMES[entry.dtype]}")  # fmt: skip
        table = tensor.reshape(tensor.shape[0], -1) if tensor.dim() != 2 else tensor
        width = entry.nbytes // entry.dtype.itemsize // max(1, entry.shape[0])
        (row, col), (rows, cols) = start, table.shape
        if row < 0 or col < 0 or row + rows > entry.shape[0] or col + cols > width:
            raise ConversionError(f"{name}: rows {row}..{row + rows}, columns {col}..{col + cols} lie outside "
                                  f"{list(entry.shape)}")  # fmt: skip
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_WRONLY)
        item, fd = entry.dtype.itemsize, self._files[file]
        raw = memoryview(table.contiguous().view(torch.uint8).numpy()).cast("B") if table.numel() else memoryview(b"")
        if cols == width:
            _write_all(fd, raw, entry.offset + row * width * item)
        else:
            for i in range(rows):
                at = entry.offset + ((row + i) * width + col) * item
                _write_all(fd, raw[i * cols * item : (i + 1) * cols * item], at)
        return rows * cols

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def _write_all(fd: int, raw: memoryview, at: int) -> None:
    while raw:
        done = os.pwrite(fd, raw, at)
        raw, at = raw[done:], at + done
