"""Python objects between the trainer's ranks."""

from __future__ import annotations

import torch.distributed as dist


def from_all[T](value: T) -> list[T]:
    """The value of every rank, in rank order, on every rank. Collective; the value is pickled."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
