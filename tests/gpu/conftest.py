"""Modules beside the tests and the helpers of the CPU tests (`gemm_recorder`, `recording_worker`) by name, here and in
processes that tests start."""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cpu")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*FOLDERS, os.environ.get("PYTHONPATH")]))


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `alone` measure the whole GPU: while one of them runs, no other test does, whichever the worker."""
    with (Path(tempfile.gettempdir()) / f"jetrl-gpu-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield
