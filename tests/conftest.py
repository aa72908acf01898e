"""For all tests and the processes that they start: keep compiled bytecode, begin with what takes longest, and let GPU
tests take turns.

The tests start some hundred processes that import vLLM or Megatron; where a machine switches bytecode off, each of them
compiles ten thousand lines again (12 s for `import vllm` instead of 7).
"""

import fcntl
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LONGEST = ("slurm/test_jobs", "slurm/", "cpu/test_launch_docs", "cpu/test_train_run", "cpu/test_kernels_interpreted")


def pytest_collection_modifyitems(items):
    """Files go whole to one worker each: a long one that begins late leaves the other worker idle."""

    def place(item) -> int:
        file = item.nodeid.partition("::")[0]
        return next((i for i, name in enumerate(LONGEST) if name in file), len(LONGEST))

    items.sort(key=place)


GPU_FOLDERS = [Path(__file__).parent / name for name in ("gpu", "multi_gpu")]
held: list[int] = []
"""The open lock file, while this process has its turn."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """GPU tests marked `alone` measure a whole GPU: while one of them runs, no other GPU test does, on any worker.

    A lock around a test with its fixtures' set-up and tear-down: a fixture could not hold it, as pytest sets up the
    fixtures of a module first. It is kept from one test of a module to the next, because the module's fixtures (worlds
    of ranks) live on in between; so beside an `alone` test stands no fixture of the module that takes a GPU's memory.
    Waiting does not count for the test's time-out (`tryfirst`).
    """
    if item.path.parent not in GPU_FOLDERS:
        return (yield)
    if not held:
        path = Path(tempfile.gettempdir()) / f"jetrl-gpu-tests-{os.getuid()}.lock"
        held.append(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        fcntl.flock(held[0], fcntl.LOCK_EX if _alone(item) else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        goes_on = nextitem is not None and nextitem.path == item.path and _alone(nextitem) == _alone(item)
        if not goes_on:
            # Children that were forked share the file: closing it would not be enough.
            fcntl.flock(held[0], fcntl.LOCK_UN)
            os.close(held.pop())


def _alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None
