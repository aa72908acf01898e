"""A worker extension that records what enters the engine's FP8 GEMMs, as the engine runs them."""

from __future__ import annotations

import numpy as np
from gemm_recorder import GemmRecorder, as_arrays

from jetrl_megatron.rollout.weight_transfer import WorkerExtension

# In the engine's process from its start: before anything is compiled or captured.
_recorder = GemmRecorder(("jetrl_kernels.fp8_linear", "jetrl_megatron.rollout.gpu.ops"))


class RecordingWorker(WorkerExtension):
    def record_gemms(self) -> None:
        _recorder.start()

    def recorded_gemms(self, rows: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Weight's name -> (codes, scales) of the `rows` rows that met it; see `GemmRecorder.entered`."""
        parameters = self.weight_transfer_engine.parameters
        return {
            name.removesuffix("_scale_inv"): as_arrays(
                _recorder.entered(parameters[name.removesuffix("_scale_inv")], rows)
            )
            for name in parameters
            if name.endswith("_scale_inv")
        }

    def stop_recording(self) -> None:
        _recorder.stop()
