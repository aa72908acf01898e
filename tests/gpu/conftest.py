"""Helpers of the CPU tests (`gemm_recorder`, `recording_worker`) by name, here and in processes that tests start."""

import os
import sys
from pathlib import Path

HELPERS = str(Path(__file__).parents[1] / "cpu")
sys.path.insert(0, HELPERS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HELPERS, os.environ.get("PYTHONPATH")]))
