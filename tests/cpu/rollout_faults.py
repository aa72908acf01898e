"""A worker extension that looks at live parameters of the engine, and damages them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator

import psutil
import torch
from recording_worker import RecordingWorker


class FaultyWorker(RecordingWorker):
    def storage(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self.weight_transfer_engine.parameters.items()}

    def resident_bytes(self) -> int:
        return psutil.Process().memory_info().rss

    def flip_bit(self, name: str) -> None:
        self.weight_transfer_engine.parameters[name].view(torch.uint8).view(-1)[1234] ^= 1

    def swap_rows(self, name: str, first: int, second: int, count: int) -> None:
        rows = self.weight_transfer_engine.parameters[name].view(torch.uint8)
        kept = rows[first : first + count].clone()
        rows[first : first + count] = rows[second : second + count]
        rows[second : second + count] = kept

    def die_while_copying(self, after: int) -> None:
        """End this process when it has copied `after` tensors of the next version."""
        engine = self.weight_transfer_engine
        check = engine.check

        def some(sources: Iterable) -> Iterator:
            for number, pair in enumerate(sources):
                if number == after:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield pair

        def armed(values):
            message, sources = check(values)
            return message, some(sources)

        engine.check = armed  # type: ignore[method-assign, assignment]
