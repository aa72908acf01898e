"""What only CPUs with AMX can test."""

import pytest
import torch

needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's stock FP8 kernel for CPUs needs AMX, which this CPU lacks"
)
