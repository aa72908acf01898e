"""Worker methods that look inside a running engine, for `jetrl verify parity --layers` and tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from jetrl_megatron.rollout.weight_transfer import WorkerExtension


class ProbeExtension(WorkerExtension):
    """Records the residual stream after each decoder layer. Needs an engine with `enforce_eager`."""

    def jetrl_record(self) -> None:
        """Begin to record: every forward pass from now on appends to each layer's list."""
        self._recorded: dict[int, list[Tensor]] = {}
        self._hooks = [
            layer.register_forward_hook(self._hook(number))
            for number, layer in enumerate(self.weight_transfer_engine.model.model.layers)  # type: ignore[union-attr]
        ]

    def _hook(self, number: int):
        def record(module, inputs, output) -> None:
            hidden, residual = output
            # The next layer's norm adds and rounds; the trainer's layers do it before they return.
            self._recorded.setdefault(number, []).append((hidden + residual).cpu())

        return record

    def jetrl_recorded(self) -> list[np.ndarray]:
        """Stop recording; for each layer the rows `[T, H]` of all passes, in order: BF16 bits as int16, because torch
        sends tensors through a pipe by file descriptors that only its own child processes may open."""
        for hook in self._hooks:
            hook.remove()
        return [torch.cat(self._recorded[n]).view(torch.int16).numpy() for n in sorted(self._recorded)]
