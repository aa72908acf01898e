"""Modules beside the tests and the helpers of the CPU tests (`gemm_recorder`, `recording_worker`) by name, here and in
processes that tests start."""

import os
import sys
from pathlib import Path

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cpu")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*FOLDERS, os.environ.get("PYTHONPATH")]))
