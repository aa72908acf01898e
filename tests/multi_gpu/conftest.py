"""Modules beside the tests, and helpers of the GPU and CPU tests, by name, here and in processes that tests start."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDERS = [str(TESTS / name) for name in ("multi_gpu", "gpu", "cpu")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*FOLDERS, os.environ.get("PYTHONPATH")]))
