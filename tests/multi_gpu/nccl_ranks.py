"""A trainer rank on one GPU and a receiver on another, as two nodes: weights by NCCL. No engine, no Megatron.

python nccl_ranks.py ROLE PORT MODEL LAYERS, with torchrun's variables (`ranks.rank`). Roles: `lead` on rank 0, `victim`
and `replacement` on two rank 1.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_conversion.known_models import known_config
from jetrl_conversion.layout import Layout
from jetrl_conversion.model_spec import load_model_spec
from jetrl_conversion.planner import quantized_tensors
from jetrl_megatron.commands.bench_refit_ranks import empty_parameters, quantized, shard
from jetrl_megatron.config import RefitConfig
from jetrl_megatron.refit import member as member_module
from jetrl_megatron.refit.digests import merge_digests, rank_digests
from jetrl_megatron.refit.peers import Peers, Store, TransferFailed
from jetrl_megatron.refit.places import Places

FAULT_TIMEOUT_S = 20.0
SOURCE, REPLICA = Layout("megatron"), Layout("vllm")


class End:
    """One rank's end: what it sends, or an engine's parameters at the receiving end."""

    def __init__(self, rank: int, model: str, layers: int):
        self.rank, self.device = rank, torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        self.spec = load_model_spec(known_config(model) | {"num_hidden_layers": layers})
        self.fp8 = quantized_tensors(self.spec, SOURCE, REPLICA)
        config, places = RefitConfig(timeout_s=FAULT_TIMEOUT_S, staging_mib=4), Places((0,), (1,), 1)
        self.member = member_module.Member(self.spec, SOURCE, REPLICA, self.fp8, places, rank, self.device, config)
        self.member.open()
        self.tensors: dict[str, Tensor] = {}
        if rank:
            self.member.parameters[0] = [empty_parameters(self.member, 0)]
        else:
            self.tensors = quantized(self.spec, SOURCE, 0, shard(self.spec, SOURCE, 0, self.device), self.fp8)

    def move(self) -> None:
        self.member.exchange(self.tensors)

    def digests(self) -> dict[str, int]:
        layout, held = (REPLICA, self.member.parameters[0][0]) if self.rank else (SOURCE, self.tensors)
        return merge_digests([rank_digests(self.spec, layout, 0, held)])


class Dying(Peers):
    """Connections of a process that is killed with its 8th pack under way."""

    left = 8

    def receive(self, buffer: Tensor, sender: int) -> dist.Work:
        work = super().receive(buffer, sender)
        Dying.left -= 1
        if Dying.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return work


def lead(rank: int, port: int, model: str, layers: int) -> None:
    """Lose the receiver half-way, send all to its replacement; print what was seen."""
    end, store = End(rank, model, layers), _meet(port, True)
    kinds = [pack.straight for pack in end.member.peer_to_peer.packs]
    found: dict = {"straight": kinds.count(True), "buffered": kinds.count(False)}
    end.member.join(store, (0, 1), 0)
    started = time.monotonic()
    try:
        end.move()
    except TransferFailed as error:
        found |= {"failed": str(error), "seconds": time.monotonic() - started}
    print(json.dumps(found), flush=True)
    store.store.set("replace", b"1")
    end.member.join(store, (0, 1), 1)
    end.move()
    theirs = json.loads(store.store.get("digests"))
    found["digests_equal"] = theirs == {name: str(value) for name, value in end.digests().items()}
    print(json.dumps(found), flush=True)
    store.store.set("seen", b"1")
    end.member.close()


def victim(rank: int, port: int, model: str, layers: int) -> None:
    end, store = End(rank, model, layers), _meet(port, False)
    end.member.join(store, (0, 1), 0)
    assert end.member.peers is not None
    end.member.peers.__class__ = Dying
    end.move()


def replacement(rank: int, port: int, model: str, layers: int) -> None:
    end, store = End(rank, model, layers), _meet(port, False)
    store.store.wait(["replace"], timedelta(seconds=120))
    end.member.join(store, (0, 1), 1)
    end.move()
    store.store.set("digests", json.dumps({name: str(value) for name, value in end.digests().items()}).encode())
    store.store.wait(["seen"], timedelta(seconds=60))
    end.member.close()


def _meet(port: int, lead: bool) -> Store:
    """The others may come up earlier than the one who holds the store."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return Store("127.0.0.1", port, FAULT_TIMEOUT_S, lead=lead)
        except (RuntimeError, TimeoutError):
            if time.monotonic() > deadline:
                raise


if __name__ == "__main__":
    role, port, model, layers = sys.argv[1:]
    faulthandler.dump_traceback_later(60)  # the log then says what a rank waits for
    {"lead": lead, "victim": victim, "replacement": replacement}[role](
        int(os.environ["RANK"]), int(port), model, int(layers)
    )
    os._exit(0)
