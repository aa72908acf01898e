"""Where a CUDA tensor took the slow reference because no kernel accepts its shape: said once, counted always."""

from __future__ import annotations

import warnings
from collections import Counter

_counts: Counter[str] = Counter()


class KernelFallbackWarning(UserWarning):
    """A kernel was asked for something only its reference does."""


def note(operation: str, reason: str) -> None:
    """Count one fall-back of `operation`; warn the first time that it happens for this reason."""
    key = f"{operation}: {reason}"
    if not _counts[key]:
        warnings.warn(f"{key}; the reference runs instead (slower, same result)", KernelFallbackWarning, stacklevel=3)
    _counts[key] += 1


def counts() -> dict[str, int]:
    """Number of fall-backs so far, by `operation: reason`. Shown by `jetrl doctor`."""
    return dict(_counts)


def reset() -> None:
    """Forget all counts (and warn again)."""
    _counts.clear()
