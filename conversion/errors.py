"""Errors of the conversion layer. Each carries one line for every problem found, so that a user fixes all at once."""

from __future__ import annotations

from collections.abc import Iterable


class ConversionError(ValueError):
    """Input that cannot be converted. `problems` holds one line per problem, each naming the file or tensor."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CheckpointError(ConversionError):
    """A checkpoint folder that is broken, incomplete, or not what its index or config says."""


class LayoutError(ConversionError):
    """A parallel layout in which the model cannot be built at all."""
