"""The Triton kernels on a CPU, in Triton's interpreter: the GPU tests of the kernels, run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).resolve().parents[1] / "gpu"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["quantizers", "producers", "gemm", "qk_norm_rope"])
def test_kernels_interpreted(name):
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-v"]
    run = subprocess.run(
        [*command, str(TESTS / f"test_kernels_{name}.py")], env=env, capture_output=True, text=True, timeout=580
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout  # a run that skipped everything proves nothing
