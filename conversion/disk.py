"""A full disk or quota, said so that its user can act: which file, what it needs, what is free."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def require_room(path: Path, need: int) -> None:
    """Raise OSError if fewer than `need` bytes are free where `path` is to lie: before anything is written."""
    if _free(path) < need:
        raise disk_full(path, need=need)


def disk_full(path: Path, number: int = errno.ENOSPC, need: int = 0) -> OSError:
    """`[Errno 28] No space left on device (needs 2.4 GB, 1.1 GB are free): '/runs/a'`."""
    needs = f"needs {size_text(need)}, " if need else ""
    return OSError(number, f"{os.strerror(number)} ({needs}{size_text(_free(path))} are free)", str(path))


@contextmanager
def writing(path: Path, need: int = 0) -> Iterator[None]:
    """Name the file, and the room that is left, in the error of a write: Python's own says neither."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise disk_full(path, error.errno, need) from None


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def size_text(count: int) -> str:
    """`2.4 GB`, `19.3 MB`: decimal units, as disks are sold."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
