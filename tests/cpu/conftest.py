"""Modules beside the tests (not `test_*.py`) can be imported by name, here and in processes that tests start."""

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
# Spinning OpenMP threads of several processes starve each other on few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
