"""Reading the pickles of a Megatron checkpoint without letting them run code.

A torch distributed checkpoint describes itself in `.metadata`, a pickle; unpickling one from a stranger runs whatever
it says. Here only the dozen names that such a file needs are allowed. The tensors themselves (`*.distcp`, `common.pt`)
are torch archives and are read by torch's own restricted unpickler (`weights_only=True`).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from jetrl_conversion.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
ALLOWED = frozenset(
    {(_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                                    "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")}
    | {(_FILESYSTEM, "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
       ("collections", "OrderedDict")}
    | {("torch", name) for name in ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2",
                                    "uint8", "int8", "int16", "int32", "int64", "bool")}
)  # fmt: skip
"""(module, name) of everything that `.metadata` may refer to."""

ALLOWED_COMMON = frozenset({"argparse.Namespace", "pathlib.PosixPath", "pathlib._local.PosixPath", "signal.Signals"})
"""What `common.pt` of Megatron-LM holds beside tensors: the arguments of the run."""
_ALLOWED_COMMON_PREFIXES = ("megatron.core.", "torch.")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"refers to {module}.{name}, which a checkpoint has no need of")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("refers to a persistent object")


def load_metadata(folder: str | Path) -> Any:
    """Unpickle `folder`/.metadata: a torch.distributed.checkpoint.metadata.Metadata.

    Raises:
        CheckpointError: no such file, cut, not such a pickle, or one that refers to anything not in `ALLOWED` (named).
    """
    from torch.distributed.checkpoint.metadata import Metadata

    file = Path(folder) / ".metadata"
    try:
        with file.open("rb") as handle:
            metadata = _Unpickler(handle).load()
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; {folder} is not a complete distributed checkpoint") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{file}: refused: {error}") from None
    except Exception as error:  # a broken pickle raises nearly anything: EOFError, ValueError, KeyError, TypeError ...
        raise CheckpointError(f"{file}: not a readable pickle ({type(error).__name__}: {error})") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{file}: holds a {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata


def check_metadata(folder: str | Path) -> Any:
    """Load `.metadata` safely and hold it against the files: every chunk inside an existing file of this folder.

    Returns:
        The Metadata.

    Raises:
        CheckpointError: as `load_metadata`; a data file missing or too short, a path that leaves the folder, chunks
            that do not tile their tensor, or a `common.pt` that refers to anything unusual. All problems are listed.
    """
    folder = Path(folder)
    metadata, problems = load_metadata(folder), []
    problems += _check_storage(folder, metadata)
    for name, item in metadata.state_dict_metadata.items():
        chunks = getattr(item, "chunks", None)
        if chunks is not None and not _tiles(tuple(item.size), chunks):
            problems.append(
                f"{folder / '.metadata'}: the chunks of {name} do not cover its shape {list(item.size)} once"
            )
    common = folder / "common.pt"
    if common.is_file():
        problems += _check_common(common)
    if problems:
        raise CheckpointError(problems)
    return metadata


def _check_storage(folder: Path, metadata: Any) -> list[str]:
    sizes: dict[str, int | None] = {}
    needs: dict[str, tuple[int, str]] = {}
    problems = []
    for index, info in metadata.storage_data.items():
        path = info.relative_path
        if not isinstance(path, str) or Path(path).name != path:
            problems.append(f"{folder / '.metadata'}: {index.fqn} is said to lie in {path!r}, outside of the folder")
            continue
        if info.offset < 0 or info.length < 0:
            problems.append(f"{folder / path}: {index.fqn} is said to lie at {info.offset}, {info.length} bytes")
        needs[path] = max(needs.get(path, (0, "")), (info.offset + info.length, index.fqn))
    for path, (end, fqn) in needs.items():
        file = folder / path
        sizes[path] = file.stat().st_size if file.is_file() else None
        if sizes[path] is None:
            problems.append(f"{file}: no such file; it should hold {fqn}")
        elif sizes[path] < end:  # type: ignore[operator]
            problems.append(f"{file}: {sizes[path]} bytes, {fqn} ends at {end} (cut)")
    return problems


def _tiles(shape: tuple[int, ...], chunks: list[Any]) -> bool:
    """Whether the chunks lie inside `shape`, do not overlap, and have its volume together."""
    volume, whole, boxes = 0, 1, set()
    for n in shape:
        whole *= n
    for chunk in chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if len(offsets) != len(shape) or any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, shape)):
            return False
        piece = 1
        for s in sizes:
            piece *= s
        volume += piece
        boxes.add((offsets, sizes))
    return volume == whole and len({offsets for offsets, _ in boxes}) == len(chunks)


def _check_common(file: Path) -> list[str]:
    import torch

    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:  # any kind of broken archive
        return [f"{file}: not a readable torch archive ({type(error).__name__}: {error})"]
    bad = [name for name in unsafe if name not in ALLOWED_COMMON and not name.startswith(_ALLOWED_COMMON_PREFIXES)]
    return [f"{file}: refused: refers to {name}, which a checkpoint has no need of" for name in sorted(bad)]
