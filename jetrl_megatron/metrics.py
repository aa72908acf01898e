"""metrics.jsonl, TensorBoard and the console of a run: one object, one point, one line a step.

A run can be killed at any moment and resumed: a line is on the disk before the next step starts, a torn last line is
dropped when read, and `resume` cuts off what a checkpoint does not cover, so that the resumed run writes it again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jetrl_conversion.disk import writing

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"

_REQUIRED = (
    "step policy_version reward_mean response_length_mean loss grad_norm kl_k1 kl_k3 logprob_abs_diff_mean "
    "logprob_abs_diff_max logprob_mismatch_fraction ess refit_tensors refit_tensors_mismatched refit_bytes "
    "refit_seconds rollout_seconds train_seconds step_seconds rollout_tokens_per_second"
)
REQUIRED = tuple(_REQUIRED.split())
"""Keys that every line has. Steps count from 1: the line of step n describes the n-th update."""

ETA_WINDOW = 10
"""Steps over which the time per step is averaged. The first one waits for engines to start: it counts only until there
is a second."""


class Sink(Protocol):
    """What TensorBoard's SummaryWriter offers and a run uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class MetricsWriter:
    """Writes a run's metrics. A context manager; call `resume` before the first `log`.

    Args:
        output: folder of the run; made if missing.
        total_steps: of the whole run, resumed part included; for the progress bar and the ETA.
    """

    def __init__(self, output: Path, total_steps: int):
        self.path, self.total = Path(output) / METRICS, total_steps
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._board = self._progress = None
        self._done = 0
        self._times: deque[float] = deque(maxlen=ETA_WINDOW)
        self._starting = True
        self._last = time.perf_counter()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except OSError:  # a full disk again, which has been said already
            if kind is None:
                raise

    def resume(self, step: int) -> None:
        """Keep the lines of steps 1 to `step` and continue behind them; 0 starts from nothing.

        The file is replaced in one move: a kill in between leaves the old one or the new one.

        Raises:
            ValueError: the file does not cover the steps up to `step`, or a line before the last is broken.
        """
        kept = [line for line in read_metrics(self.path.parent) if line["step"] <= step] if self.path.exists() else []
        if [line["step"] for line in kept] != list(range(1, step + 1)):
            raise ValueError(f"{self.path} holds steps {[x['step'] for x in kept]}, the checkpoint is of step {step}")
        self.close()
        part = self.path.with_name(f".{METRICS}.partial")
        with writing(self.path), part.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)
        self._done, self._last = step, time.perf_counter()
        self._open()

    def log(self, values: Mapping[str, Any]) -> None:
        """Write one step. NaN and infinity become null in the file (bare NaN is no JSON) and stay NaN in TensorBoard.

        Raises:
            ValueError: a required key is missing, or `step` is not the one that follows.
        """
        missing = [key for key in REQUIRED if key not in values]
        if missing:
            raise ValueError(f"metrics of step {values.get('step')} lack {', '.join(missing)}")
        if values["step"] != self._done + 1:
            raise ValueError(f"metrics of step {values['step']} after step {self._done}")
        if self._file is None:
            self.resume(self._done)
        assert self._file is not None and self._board is not None
        with writing(self.path):
            self._file.write(json.dumps({key: _plain(value) for key, value in values.items()}, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            for key, value in values.items():
                if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._board.add_scalar(key, value, values["step"])
            self._board.flush()
        self._done = values["step"]
        now = time.perf_counter()
        if self._starting and self._times:
            self._times.clear()
            self._starting = False
        self._times.append(now - self._last)
        self._last = now
        self._say(console_line(values, self.total, self.eta()))

    def eta(self) -> float | None:
        """Seconds to the end of the run at the pace of the last steps; None before the first."""
        if not self._times:
            return None
        return max(self.total - self._done, 0) * sum(self._times) / len(self._times)

    def close(self) -> None:
        """Close the files and the bar; harmless when called again."""
        if self._progress is not None and self._progress.live.is_started:
            self._progress.stop()
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            self._file.close()
        self._file = self._board = self._progress = None

    def _open(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._file = self.path.open("a")
        self._board = _board(self.path.parent / TENSORBOARD, self._done + 1)
        self._progress = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
        )
        self._task = self._progress.add_task("train", total=self.total, completed=self._done, eta="")
        if self._progress.console.is_terminal:
            self._progress.start()

    def _say(self, line: str) -> None:
        assert self._progress is not None
        if self._progress.console.is_terminal:
            self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._progress.update(self._task, completed=self._done, eta=f"eta {_clock(self.eta())}")
        else:
            print(line, flush=True)  # a log file: one plain line, no bar


def console_line(values: Mapping[str, Any], total: int, eta: float | None) -> str:
    """One step in a line of about 130 characters."""
    width = len(str(total))
    parts = [
        f"step {values['step']:>{width}}/{total}",
        f"reward {_short(values['reward_mean'])}",
        f"len {values['response_length_mean']:.1f}",
        f"loss {_short(values['loss'])}",
        f"grad {_short(values['grad_norm'])}",
        f"kl {values['kl_k3']:.1e}",
        f"|dlogp| {values['logprob_abs_diff_mean']:.1e}",
        f"refit {values['refit_tensors'] - values['refit_tensors_mismatched']}/{values['refit_tensors']} equal",
    ]
    if values.get("eval_pass_at_1") is not None:
        parts.append(f"eval {values['eval_pass_at_1']:.3f}")
    return "  ".join([*parts, f"{values['step_seconds']:.1f}s", f"eta {_clock(eta)}"])


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run, oldest first. A torn last line (the writer was killed) is dropped; null reads as None.

    Raises:
        FileNotFoundError: no metrics.jsonl in the folder.
        ValueError: a line that is not the last is broken; its number is named.
    """
    path = Path(folder) / METRICS
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # what follows the last line end: empty, unless a write was cut short
    out: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if not isinstance(values, dict) or not isinstance(values.get("step"), int):
                raise ValueError("no step")
        except ValueError as error:
            # After a crash of the machine, a block that never reached the disk may read as zeros.
            if number == len(lines) and not torn:
                break
            raise ValueError(f"{path}:{number} is not a line of metrics: {error}") from error
        out.append(values)
    return out


def _board(folder: Path, first_step: int) -> Sink:
    """TensorBoard events, those of earlier attempts hidden from `first_step` on."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=first_step)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: float) -> str:
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.1e}"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
