"""What ends a run for a reason that its user should read: shown as one line, without a traceback."""

from __future__ import annotations


class RunError(RuntimeError):
    """A rank, an engine or a refit failed; the message says which and why."""
