"""Point-to-point connections between the members of a refit: gloo between CPUs, NCCL between GPUs.

A process group beside torch's own, so that processes that train nothing can be members, and so that it can be thrown
away and made anew, without its dead members, when a transfer fails: after one time-out a group is of no use.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.errors import RunError


class TransferFailed(RunError):
    """Bytes did not arrive in time, or a peer is gone. The receiving side holds nothing that may be used."""


class Store:
    """Where members find each other. The first trainer rank holds it, everyone else connects to its address."""

    def __init__(self, host: str, port: int, timeout_s: float, *, lead: bool):
        self.timeout_s = timeout_s
        self.store = dist.TCPStore(host, port, None, lead, timedelta(seconds=timeout_s), wait_for_workers=False)

    @property
    def port(self) -> int:
        return self.store.port


class Peers:
    """A member's connections to the others. Collective: all of `members` make it at once.

    Args:
        members: numbers of the members that take part, in order.
        member: this process's own.
        epoch: counts the groups of one run; each has fresh connections.
        device: NCCL if it is a GPU.

    Raises:
        TransferFailed: the others did not come in `store.timeout_s`.
    """

    def __init__(self, store: Store, members: Sequence[int], member: int, epoch: int, device: torch.device):
        self.members, self.member, self.device, self.timeout_s = tuple(members), member, device, store.timeout_s
        place, wait = self.members.index(member), timedelta(seconds=self.timeout_s)
        prefix = dist.PrefixStore(f"refit-{epoch}", store.store)
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = wait
                with _errors_to_the_caller():
                    self.group = dist.ProcessGroupNCCL(prefix, place, len(self.members), options)
            else:
                self.group = dist.ProcessGroupGloo(prefix, place, len(self.members), wait)
        except RuntimeError as error:
            raise TransferFailed(f"member {member} cannot connect to members {list(members)}: {error}") from error

    def send(self, buffer: Tensor, to: int) -> dist.Work:
        """Start sending uint8 `buffer`; it must not change before `finish`."""
        return self._start(self.group.send, buffer, to)

    def receive(self, buffer: Tensor, sender: int) -> dist.Work:
        """Start receiving into uint8 `buffer`."""
        return self._start(self.group.recv, buffer, sender)

    def _start(self, operation, buffer: Tensor, peer: int) -> dist.Work:
        try:
            return operation([buffer], self.members.index(peer), 0)
        except RuntimeError as error:
            raise TransferFailed(f"member {self.member}, with member {peer}: {error}") from error

    def finish(self, work: dist.Work) -> None:
        """Wait for a send or receive.

        Raises:
            TransferFailed: after the time-out, or at once when the peer is gone.
        """
        try:
            if self.device.type == "cuda":  # without the pauses of NCCL's own wait, which then raises what went wrong
                deadline = time.monotonic() + self.timeout_s
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"no answer in {self.timeout_s:.0f} s")
                    time.sleep(0)
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise TransferFailed(f"member {self.member}: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """Give the connections up, whatever is still under way on them."""
        if self.device.type == "cuda":
            self.group.abort()
        del self.group


@contextlib.contextmanager
def _errors_to_the_caller() -> Iterator[None]:
    """An NCCL group made within raises from `wait` when a peer is gone; any other ends the process by its watchdog."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
