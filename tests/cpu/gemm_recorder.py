"""What enters every FP8 forward GEMM of a process, trainer's or engine's, also inside compiled code and CUDA graphs."""

from __future__ import annotations

import importlib

import numpy as np
import torch
from torch import Tensor

CALLERS = ("jetrl_kernels.fp8_linear", "jetrl_megatron.rollout.gpu.ops", "jetrl_megatron.megatron.mlp")
"""Modules that call `gemm_fprop`, each by its own name for it."""
POISON = 0x7F
"""The byte of an E4M3 NaN, which no quantizer writes for finite input."""


class GemmRecorder:
    """Copies the activation codes and scales of each `gemm_fprop`, by the weight that they meet and their rows.

    In a CUDA graph the copy is captured with the GEMM, and every replay refreshes it. Its target was allocated by the
    run that warms up before a capture: memory allocated during a capture belongs to the graphs' common pool, where an
    earlier graph's replay may write. `start` poisons the copies, so that those written since can be told.
    """

    def __init__(self, callers: tuple[str, ...] = CALLERS) -> None:
        self._recording = False
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for module in map(importlib.import_module, callers):
            self._wrap(module)

    def _wrap(self, module) -> None:
        inner = module.gemm_fprop

        def recorded(codes: Tensor, scale: Tensor, w_codes: Tensor, *args, **kwargs) -> Tensor:
            if codes.is_cuda or self._recording:
                self._copy((w_codes.data_ptr(), codes.shape[0]), codes, scale)
            return inner(codes, scale, w_codes, *args, **kwargs)

        module.gemm_fprop = recorded

    def _copy(self, key: tuple[int, int], codes: Tensor, scale: Tensor) -> None:
        if key not in self._copies:
            assert not (codes.is_cuda and torch.cuda.is_current_stream_capturing()), f"no warm-up of {key[1]} rows"
            self._copies[key] = torch.empty_like(codes), torch.empty_like(scale)
        for target, source in zip(self._copies[key], (codes, scale)):
            target.copy_(source)

    def start(self) -> None:
        """Record from now on, and forget every run so far."""
        self._recording = True
        for codes, _ in self._copies.values():
            codes.view(torch.uint8).fill_(POISON)

    def entered(self, w_codes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """(codes E4M3 `[rows, K]`, scales FP32 `[rows, K / 128]`) that met this weight since `start`, padding cut off.

        Several runs may have met it: taken is the one with the fewest rows that are enough.
        """
        met = [(n, copy) for (address, n), copy in self._copies.items() if address == w_codes.data_ptr()]
        runs = {n: copy for n, copy in met if not (copy[0].view(torch.uint8) == POISON).all()}
        enough = [n for n in runs if n >= rows]
        assert enough, f"no GEMM of {rows} rows or more among {sorted(runs)}"
        codes, scale = runs[min(enough)]
        return codes[:rows], scale[:rows]

    def stop(self) -> None:
        self._recording = False


def as_arrays(found: tuple[Tensor, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and FP32 numbers, which travel through a pipe and compare with `array_equal`."""
    codes, scale = (x.contiguous().cpu() for x in found)
    return codes.view(torch.uint8).numpy(), scale.numpy()
