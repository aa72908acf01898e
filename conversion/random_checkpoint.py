"""Checkpoints of random weights in any size of any family: for tests and for `jetrl bench convert`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jetrl_conversion.jobs import Job, run_jobs
from jetrl_conversion.model_spec import load_model_spec
from jetrl_conversion.safetensors_io import HFFolderWriter
from jetrl_conversion.torch_dist import split_rows


def write_random_checkpoint(
    path: str | Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 5 << 30,
) -> None:
    """A Hugging Face folder with normal weights of deviation 1 / sqrt(fan in); norms near 1, biases small.

    The values depend on `seed`, the tensor's name and the row only, not on the number of threads.
    """
    spec = load_model_spec(config)
    shapes = {name: info.shape for name, info in spec.tensors().items()}
    tensors = {name: (dtype, shape) for name, shape in shapes.items()}
    with HFFolderWriter(path, tensors, config, shard_bytes=shard_bytes) as writer:
        jobs: list[Job] = []
        for number, (name, shape) in enumerate(shapes.items()):
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            for row, rows in split_rows(shape[0], row_bytes, 16 << 20):
                jobs.append((_fill(writer, name, shape, row, rows, seed * 1_000_003 + number, dtype), rows * row_bytes))
        run_jobs(jobs, f"generating {Path(path).name}")


def _fill(
    writer: HFFolderWriter, name: str, shape: tuple[int, ...], row: int, rows: int, seed: int, dtype: torch.dtype
) -> Callable[[], None]:
    def work() -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + row)
        cols = math.prod(shape[1:])
        data = torch.randn(rows, cols, generator=generator)
        if len(shape) == 1:
            data = 1 + 0.1 * data if name.endswith("norm.weight") else 0.1 * data
        else:
            data /= math.sqrt(cols)
        writer.write(name, (row, 0), data.to(dtype))

    return work
