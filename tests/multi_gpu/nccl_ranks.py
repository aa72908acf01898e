"""A trainer rank on one GPU and a receiver on another, as two nodes: packs by NCCL, in chunks. No engine, no Megatron.

python nccl_ranks.py ROLE PORT MODEL LAYERS, with torchrun's variables (`ranks.rank`). Roles: `speed` on both ranks, or
`lead` on rank 0 and `victim` and `replacement` on two rank 1.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
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
from jetrl_kernels.quant_weight import quant_weight
from jetrl_megatron.commands.bench_refit_cpu import quantized, shard
from jetrl_megatron.config import RefitConfig
from jetrl_megatron.refit import member as member_module
from jetrl_megatron.refit.digests import merge_digests, rank_digests
from jetrl_megatron.refit.message import DTYPES
from jetrl_megatron.refit.peers import Peers, Store, TransferFailed
from jetrl_megatron.refit.places import Places

ROUNDS = 6
"""The first is not counted."""
FAULT_TIMEOUT_S = 20.0
SOURCE, REPLICA = Layout("megatron"), Layout("vllm")


class End:
    """One rank's end: what it sends, or an engine's parameters at the receiving end."""

    def __init__(self, rank: int, model: str, layers: int, timeout_s: float, staging_mib: int):
        self.rank, self.device = rank, torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        self.spec = load_model_spec(known_config(model) | {"num_hidden_layers": layers})
        self.fp8 = quantized_tensors(self.spec, SOURCE, REPLICA)
        config, places = RefitConfig(timeout_s=timeout_s, staging_mib=staging_mib), Places((0,), (1,), 1)
        self.member = member_module.Member(self.spec, SOURCE, REPLICA, self.fp8, places, rank, self.device, config)
        self.member.open()
        self.tensors: dict[str, Tensor] = {}
        self.live: dict[str, Tensor] = {}
        if rank:
            self.live = {
                s.name: torch.zeros(s.shape, dtype=DTYPES[s.dtype], device=self.device) for s in self.member.whole[0]
            }
        else:
            self.bf16 = {name: t.to(self.device) for name, t in shard(self.spec, SOURCE, 0).items()}
            self.tensors = quantized(self.spec, SOURCE, 0, self.bf16, self.fp8)

    def move(self, chunk: int) -> None:
        """One chunk, copied from the landing place to the parameters as an engine does."""
        self.member.exchange(self.tensors, chunk=chunk)
        for slot in self.member.slots[0] if self.rank else ():
            if slot.chunk == chunk:
                self.live[slot.name].copy_(self.member.view(0, slot.name))
        torch.cuda.synchronize()

    def digests(self) -> dict[str, int]:
        layout, held = (REPLICA, self.live) if self.rank else (SOURCE, self.tensors)
        return merge_digests([rank_digests(self.spec, layout, 0, held)])


def speed(rank: int, port: int, model: str, layers: int) -> None:
    """Print seconds of our refit, of a plain send of as many bytes, and of a BF16 broadcast with quantization."""
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=120), wait_for_workers=False)
    end = End(rank, model, layers, 60.0, 256 if model == "Qwen3-8B" else 16)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2)
    meeting = Store("127.0.0.1", 0, 60.0, lead=True) if rank == 0 else None
    box = [meeting.port if meeting else 0]
    dist.broadcast_object_list(box, src=0)
    end.member.join(meeting or Store("127.0.0.1", box[0], 60.0, lead=False), (0, 1), 0)
    flat = torch.zeros(end.member.plan.total_bytes, dtype=torch.uint8, device=end.device)

    def refit() -> None:
        for chunk in range(end.member.chunks):
            end.move(chunk)
            dist.barrier()

    def plain() -> None:
        dist.send(flat, 1) if rank == 0 else dist.recv(flat, 0)

    def rival() -> None:
        for name, info in end.spec.tensors().items():
            whole = torch.zeros(info.shape, dtype=torch.bfloat16, device=end.device)
            dist.broadcast(whole, 0)
            if rank and name in end.fp8:
                quant_weight(whole)

    found: dict = {way.__name__: _median(way) for way in (refit, plain, rival)}
    both: list = [None, None]
    dist.all_gather_object(both, end.digests())
    found |= {
        "digests_equal": both[0] == both[1],
        "bytes": end.member.plan.total_bytes,
        "chunks": end.member.chunks,
    }
    if rank == 0:
        print(json.dumps(found), flush=True)
    end.member.close()


def _median(way) -> float:
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        way()
        torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


class Dying(Peers):
    """Connections of a process that is killed with its 20th pack under way."""

    left = 20

    def receive(self, buffer: Tensor, sender: int) -> dist.Work:
        work = super().receive(buffer, sender)
        Dying.left -= 1
        if Dying.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return work


def lead(rank: int, port: int, model: str, layers: int) -> None:
    """Lose the receiver in the first chunk, send all to its replacement; print what was seen."""
    end, store = End(rank, model, layers, FAULT_TIMEOUT_S, 4), _meet(port, True)
    found: dict = {"chunks": end.member.chunks}
    end.member.join(store, (0, 1), 0)
    started = time.monotonic()
    try:
        end.move(0)
    except TransferFailed as error:
        found |= {"failed": str(error), "seconds": time.monotonic() - started}
    print(json.dumps(found), flush=True)
    store.store.set("replace", b"1")
    end.member.join(store, (0, 1), 1)
    for chunk in range(end.member.chunks):
        end.move(chunk)
    theirs = json.loads(store.store.get("digests"))
    found["digests_equal"] = theirs == {name: str(value) for name, value in end.digests().items()}
    print(json.dumps(found), flush=True)
    store.store.set("seen", b"1")
    end.member.close()


def victim(rank: int, port: int, model: str, layers: int) -> None:
    end, store = End(rank, model, layers, FAULT_TIMEOUT_S, 4), _meet(port, False)
    end.member.join(store, (0, 1), 0)
    assert end.member.peers is not None
    end.member.peers.__class__ = Dying
    end.move(0)


def replacement(rank: int, port: int, model: str, layers: int) -> None:
    end, store = End(rank, model, layers, FAULT_TIMEOUT_S, 4), _meet(port, False)
    store.store.wait(["replace"], timedelta(seconds=120))
    end.member.join(store, (0, 1), 1)
    for chunk in range(end.member.chunks):
        end.move(chunk)
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
    {"speed": speed, "lead": lead, "victim": victim, "replacement": replacement}[role](
        int(os.environ["RANK"]), int(port), model, int(layers)
    )
    os._exit(0)
