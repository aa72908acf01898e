"""The kernels on a CPU: Triton's in its interpreter (the GPU tests, in a process of their own), CUDA's compile."""

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
@pytest.mark.parametrize("name", ["quantizers", "producers", "gemm", "qk_norm_rope", "attention_parts"])
def test_kernels_interpreted(name):
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore", "-v"]
    run = subprocess.run(
        [*command, str(TESTS / f"test_kernels_{name}.py")], env=env, capture_output=True, text=True, timeout=580
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout  # a run that skipped everything proves nothing


def kernels():
    from jetrl_kernels import row_quant, tile_quant
    from jetrl_kernels.digest import kernel as digest
    from jetrl_kernels.rms_norm import kernel as norm

    chunks, warps, rows, blocks = row_quant.norm_shape(5120)
    shape = {"CHUNKS": chunks, "WARPS": warps, "ROWS": rows, "MIN_BLOCKS": blocks}
    flags = {"POW2": 1, "EXACT": 1, "RESIDUAL": 1, "BF16OUT": 0, "CODES": 1}
    yield row_quant._kernel(128, MODE=1, **shape, **flags)
    yield tile_quant._kernel("norm", "pow2", 3, ROW=1, COL=1, RESIDUAL=1)
    yield tile_quant._kernel("weight", "fp32", 3, ROW=1, COL=1, BF16OUT=1, SOURCE=2)
    yield norm._backward(4096, True)[0]
    yield digest._cuda_kernel("digest_many", True, 32)


def test_cuda_sources_compile(monkeypatch, tmp_path):
    from jetrl_kernels import cuda_lib

    try:
        cuda_lib._nvrtc()
    except (OSError, ImportError):
        pytest.skip("needs NVRTC, which torch's CUDA build brings")
    monkeypatch.setenv("JETRL_CACHE_DIR", str(tmp_path))
    sizes = [len(cuda_lib.compile_cubin(kernel.source, kernel.macros)) for kernel in kernels()]
    assert len(list((tmp_path / "cubin").iterdir())) == len(sizes) == 5 and min(sizes) > 1000
    with pytest.raises(cuda_lib.CudaError, match="undefined"):
        cuda_lib.compile_cubin("int a = nothing;", {})
