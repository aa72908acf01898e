"""Where a run's checkpoints lie. Free of torch, so that a command can look before it starts anything."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "checkpoints"
_STEP = re.compile(r"step_(\d{6,})")


def steps(output: Path) -> list[int]:
    """Steps of the complete checkpoints in a run's folder, ascending."""
    names = (_STEP.fullmatch(p.name) for p in (output / FOLDER).glob("step_*") if (p / "state.json").is_file())
    return sorted(int(m.group(1)) for m in names if m)


def path(output: Path, step: int) -> Path:
    return output / FOLDER / f"step_{step:06d}"


def latest(output: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = steps(output)
    return path(output, found[-1]) if found else None
