"""A node that only samples: `python -m jetrl_megatron.rollout.host OUTPUT NODE INDEX`, started there by the launcher.

It receives that node's copy of the weights as a member of the refit. The node's first host process also drives its
engines, as their agent.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from jetrl_conversion.model_spec import load_model_spec
from jetrl_megatron import signals
from jetrl_megatron.config import Config
from jetrl_megatron.layouts import fp8_tensors, rollout_layout, trainer_layout
from jetrl_megatron.refit.member import Member
from jetrl_megatron.refit.peers import Store, TransferFailed
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.shm import SegmentError
from jetrl_megatron.rollout.agent import Agent, connect, serve
from jetrl_megatron.rollout.pool import engines_on
from jetrl_megatron.rollout.remote import Address

METHODS = frozenset("segments join exchange release close".split())


class Host:
    """What the first trainer rank asks of a node's receiver."""

    def __init__(self, member: Member):
        self.member = member
        self._segments = member.open()
        self._store: tuple[tuple[str, int], Store] | None = None

    def segments(self) -> dict[int, str]:
        return self._segments

    def join(self, host: str, port: int, members: tuple[int, ...], epoch: int) -> None:
        """See `Member.join`."""
        if self._store is None or self._store[0] != (host, port):
            store = Store(host, port, self.member.config.timeout_s, lead=False)
            self._store = ((host, port), store)
        self.member.join(self._store[1], members, epoch)

    def exchange(self, base: int | None, chunk: int, tables: Mapping[int, Sequence[str]]) -> None:
        """Receive one chunk of a version; see `Member.exchange` and `Member.adopt`."""
        try:
            self.member.adopt(tables)
            self.member.exchange({}, base=base, chunk=chunk)
        except SegmentError as error:
            raise TransferFailed(f"member {self.member.member}: {error}") from error
        except torch.AcceleratorError:
            # After that a process can do nothing on its GPU any more; the launcher starts another.
            traceback.print_exc()
            os._exit(1)

    def release(self) -> None:
        """Unmap all engines' parameters: a GPU has their memory back only when nobody has it mapped."""
        self.member.adopt({})

    def close(self) -> None:
        self.member.close()


def main(output: Path, node: int, index: int) -> int:
    """Serve until the first trainer rank says `close`. 1 if it went away without that."""
    # Slurm signals every process of a job: this one must live until the trainers have saved.
    signals.ignore()
    config = Config.from_dict(json.loads((output / "config.json").read_text()))
    spec, wait = load_model_spec(config.model.path), config.rollout.start_timeout_s
    gpu = config.train.device != "cpu" and torch.cuda.is_available()
    places = Places.of(config, config.parallel.world_size // config.parallel.nodes, gpu)
    device = torch.device("cpu")
    if gpu:  # the engine of rank `index` reads from it
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    torch.set_num_threads(config.train.threads)
    fp8 = fp8_tensors(spec, config) if config.precision.mode != "bf16" else set()

    def address() -> Address:
        return Address.read(output)

    model = Path(config.model.path)
    engines = engines_on(node, model, config, fp8, output, device, places) if index == 0 else []
    agent = Agent(engines, address, wait)
    number = len(places.trainers) + places.hosts.index(node) + index
    host = Host(Member(spec, trainer_layout(config), rollout_layout(config), fp8, places, number, device, config.refit))
    try:
        closed = serve(host, METHODS, connect(address, ("host", number), wait))
    finally:
        agent.close()
        host.close()
    if not closed:
        print(f"error: node {node}: the first trainer rank is gone", file=sys.stderr)
    return 0 if closed else 1


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo and of agents may still run; nothing is left to be saved.
    os._exit(status)
