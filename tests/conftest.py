"""For all tests and the processes that they start: keep compiled bytecode, and begin with what takes longest.

The tests start some hundred processes that import vLLM or Megatron; where a machine switches bytecode off, each of them
compiles ten thousand lines again (12 s for `import vllm` instead of 7).
"""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LONGEST = ("slurm/test_jobs", "slurm/", "cpu/test_launch_docs", "cpu/test_train_run", "cpu/test_kernels_interpreted")


def pytest_collection_modifyitems(items):
    """Files go whole to one worker each: a long one that begins late leaves the other worker idle."""

    def place(item) -> int:
        file = item.nodeid.partition("::")[0]
        return next((i for i, name in enumerate(LONGEST) if name in file), len(LONGEST))

    items.sort(key=place)
