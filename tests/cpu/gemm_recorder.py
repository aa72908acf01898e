"""What enters every FP8 forward GEMM of a process, trainer's or engine's, also inside compiled code and CUDA graphs."""

from __future__ import annotations

import importlib
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

CALLERS = ("jetrl_kernels.fp8_linear", "jetrl_megatron.rollout.gpu.ops", "jetrl_megatron.megatron.mlp")
"""Modules that call `gemm_fprop`, each by its own name for it."""
POISON = 0x7F
"""The byte of an E4M3 NaN, which no quantizer writes for finite input."""


class GemmRecorder:
    """Copies the activation codes and scales of each `gemm_fprop`, by the address of the weight that they meet.

    In a CUDA graph the copy is captured with the GEMM, and every replay refreshes it. `start` poisons those copies, so
    that a run tells which graphs it replayed.
    """

    def __init__(self, callers: tuple[str, ...] = CALLERS) -> None:
        self._recording = False
        self._eager: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._graphs: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for module in map(importlib.import_module, callers):
            self._wrap(module)

    def _wrap(self, module) -> None:
        inner = module.gemm_fprop

        def recorded(codes: Tensor, scale: Tensor, w_codes: Tensor, *args, **kwargs) -> Tensor:
            if codes.is_cuda and torch.cuda.is_current_stream_capturing():
                self._graphs[w_codes.data_ptr()].append((codes.clone(), scale.clone()))
            elif self._recording:
                self._eager[w_codes.data_ptr(), codes.shape[0]] = codes.clone(), scale.clone()
            return inner(codes, scale, w_codes, *args, **kwargs)

        module.gemm_fprop = recorded

    def start(self) -> None:
        """Record from now on, and forget every run so far."""
        self._recording = True
        self._eager.clear()
        for copies in self._graphs.values():
            for codes, _ in copies:
                codes.view(torch.uint8).fill_(POISON)

    def entered(self, w_codes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """(codes E4M3 `[rows, K]`, scales FP32 `[rows, K / 128]`) that met this weight since `start`, padding cut off.

        Several runs may have met it: taken is the one with the fewest rows that are enough.
        """
        address = w_codes.data_ptr()
        runs = [copy for (at, _), copy in self._eager.items() if at == address]
        for codes, scale in self._graphs[address]:
            if not (codes.view(torch.uint8) == POISON).all():
                runs.append((codes, scale))
        enough = [run for run in runs if run[0].shape[0] >= rows]
        assert enough, f"no GEMM of {rows} rows or more among {[len(codes) for codes, _ in runs]}"
        codes, scale = min(enough, key=lambda run: run[0].shape[0])
        return codes[:rows], scale[:rows]

    def stop(self) -> None:
        self._recording = False
        self._eager.clear()


def as_arrays(found: tuple[Tensor, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and FP32 numbers, which travel through a pipe and compare with `array_equal`."""
    codes, scale = (x.contiguous().cpu() for x in found)
    return codes.view(torch.uint8).numpy(), scale.numpy()
