"""For all tests and the processes that they start: keep compiled bytecode.

The tests start some hundred processes that import vLLM or Megatron; where a machine switches bytecode off, each of them
compiles ten thousand lines again (12 s for `import vllm` instead of 7).
"""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
