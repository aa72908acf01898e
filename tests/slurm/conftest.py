from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, cluster, unavailable


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    why = unavailable()
    if why and not os.environ.get("CI"):
        pytest.skip(why)
    assert not why, why
    with cluster() as running:
        yield running


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that both nodes see; /tmp, where pytest's own lies, is each node's own."""
    with tempfile.TemporaryDirectory(prefix="jetrl-test-", dir="/var/tmp") as folder:
        yield Path(folder)
