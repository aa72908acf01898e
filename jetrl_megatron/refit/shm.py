"""One shared-memory segment per engine rank: trainer ranks write, the engine rank reads.

A segment is a file in /dev/shm that both sides map. Its name carries the id of the process that made it, so that what
a killed run left behind can be told from what is in use, and is removed by the next run.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from jetrl_megatron.refit.message import DTYPES, TensorSlot

PREFIX = "jetrl-segment-"


class SegmentError(OSError):
    """A segment that cannot be made or mapped; names the path."""


def segment_folder() -> Path:
    """/dev/shm, or the folder for temporary files where there is none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class Segment:
    """`nbytes` of memory shared between processes, `bytes` as a uint8 tensor."""

    def __init__(self, path: Path, nbytes: int, memory: mmap.mmap):
        self.path = path
        self.nbytes = nbytes
        self.bytes: Tensor = torch.frombuffer(memory, dtype=torch.uint8)

    @staticmethod
    def create(nbytes: int, label: str) -> Segment:
        """Make a segment of zeros. Who creates it unlinks it.

        Raises:
            SegmentError: no room in shared memory, or the folder cannot be written.
        """
        remove_stale()
        path = segment_folder() / f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}-{label}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise SegmentError(f"{path}: {error.strerror}") from error
        try:
            # Reserve pages now: a full /dev/shm should fail here, not with SIGBUS at the first write.
            os.posix_fallocate(fd, 0, nbytes)
            return Segment(path, nbytes, mmap.mmap(fd, nbytes))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise SegmentError(f"{path}: cannot get {nbytes} bytes of shared memory ({error.strerror})") from error
        finally:
            os.close(fd)

    @staticmethod
    def attach(path: str | Path) -> Segment:
        """Map a segment that another process of the same user made.

        Raises:
            SegmentError: no such segment, or something that is not a file of this user.
        """
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentError(f"segment {path}: {error.strerror}") from error
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_size == 0:
                raise SegmentError(f"segment {path}: not a file of this user with anything in it")
            return Segment(path, info.st_size, mmap.mmap(fd, info.st_size))
        finally:
            os.close(fd)

    def view(self, slot: TensorSlot) -> Tensor:
        """The slot's bytes as a tensor of its dtype and shape, sharing memory.

        Raises:
            SegmentError: the slot reaches beyond the segment.
        """
        return slot_view(self.bytes, slot, self.path)

    def unlink(self) -> None:
        """Remove the name; the memory goes when the last process unmaps it."""
        self.path.unlink(missing_ok=True)


def slot_view(memory: Tensor, slot: TensorSlot, where: object) -> Tensor:
    """A slot of uint8 `memory`; see `Segment.view`. `where` names the memory in an error."""
    if slot.offset < 0 or slot.offset + slot.nbytes > memory.nbytes:
        raise SegmentError(f"{slot.name}: ends at byte {slot.offset + slot.nbytes} of {memory.nbytes} in {where}")
    flat = memory[slot.offset : slot.offset + slot.nbytes]
    return flat.view(DTYPES[slot.dtype]).view(slot.shape)


def remove_stale() -> None:
    """Remove this user's segments whose maker is no longer alive."""
    for path in segment_folder().glob(f"{PREFIX}*"):
        maker = re.match(rf"{PREFIX}(\d+)-", path.name)
        try:
            if maker and path.stat().st_uid == os.geteuid() and not Path(f"/proc/{maker[1]}").exists():
                path.unlink(missing_ok=True)
        except OSError:
            continue
