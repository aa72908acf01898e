"""`jetrl bench refit --cpu|--nccl`: the refit and two usual ways between processes of this machine, in one run.

Each trainer rank is a process and so is each replica's receiver (with `--nccl` each of a replica's ranks, every process
with a GPU), as if every replica were on a node of its own. All three ways end with the same bytes in the replicas'
memory, which is checked.

* ours: each rectangle straight from its holder (`refit/peer_to_peer.py`).
* plain sends: as many bytes between the same pairs, one send each, which end nowhere: what the links give.
* gather + BF16: rank 0 gathers each BF16 tensor, broadcasts it, and each replica quantizes what it needs again.
* gather + FP8: the same with codes and scales, which need no second quantization.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_conversion.layout import Layout, Piece, local_shapes, pieces
from jetrl_conversion.model_spec import ModelSpec, load_model_spec
from jetrl_conversion.planner import quantized_tensors
from jetrl_kernels.formats import scale_shape
from jetrl_kernels.quant_weight import quant_weight
from jetrl_megatron.config import ConfigError, RefitConfig
from jetrl_megatron.refit.digests import rank_digests
from jetrl_megatron.refit.member import Member
from jetrl_megatron.refit.message import DTYPES, SCALE_SUFFIX
from jetrl_megatron.refit.peers import Peers, Store
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.rectangles import Rectangle, cut
from jetrl_megatron.rollout.server import watch_parent

GB = 1e9
WAIT_S = 600.0
LOG_LINES = 20
"""Of a process that failed."""


def compare(
    config: dict, source: Layout, replica: Layout, replicas: int, rounds: int, staging_mib: int, device: str
) -> None:
    """Start the processes, print the table, and a line of JSON.

    Args:
        device: `cpu`, or `cuda`: process N is on GPU N.

    Raises:
        ConfigError: too few GPUs, too little memory or staging. OSError: a process failed.
    """
    hosts = replica.world if device == "cuda" else 1
    world = source.world + replicas * hosts
    if device == "cuda" and torch.cuda.device_count() < world:
        raise ConfigError(
            [f"--nccl: {source.world} trainer ranks and {replicas * hosts} rollout ranks need {world} GPUs, "
             f"this machine has {torch.cuda.device_count()}"]
        )  # fmt: skip
    need_memory(config, source, replica, replicas, staging_mib, device)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "config": config,
        "source": {"tp": source.tp, "pp": source.pp, "ep": source.ep, "etp": source.etp, "dp": source.dp},
        "replica": {"tp": replica.tp, "ep": replica.ep},
        "replicas": replicas,
        "rounds": rounds,
        "staging_mib": staging_mib,
        "port": port,
        "device": device,
        "hosts": hosts,
    }
    output = run_all([[sys.executable, "-m", __name__, json.dumps(settings), str(rank)] for rank in range(world)])
    result = json.loads(output.splitlines()[-1])
    print(f"{source} -> {replicas} x {replica}, {world} processes; the replicas hold {result['bound'] / GB:.4f} GB")
    print(f"{'way':16}{'moved GB':>10}{'of bound':>10}{'seconds':>10}{'GB/s':>8}{'buffers MB':>12}{'ours x':>8}")
    for name, way in result["ways"].items():
        print(
            f"{name:16}{way['moved'] / GB:10.4f}{way['moved'] / result['bound']:10.3f}{way['seconds']:10.4f}"
            f"{result['bound'] / way['seconds'] / GB:8.2f}{way['staging'] / 1e6:12.1f}"
            f"{way['seconds'] / result['ways']['ours']['seconds']:8.2f}"
        )
    print(json.dumps(result))


def need_memory(config: dict, source: Layout, replica: Layout, replicas: int, staging_mib: int, device: str) -> None:
    """Raise ConfigError if a row has too little staging or, on a CPU, all processes together too little memory."""
    spec, refit = load_model_spec(config), RefitConfig(staging_mib=staging_mib)
    fp8 = quantized_tensors(spec, source, replica)
    places = Places((0,) * source.world, (1,), replica.world)
    try:
        plan = Member(spec, source, replica, fp8, places, 0, torch.device("cpu"), refit).plan
    except ValueError as error:
        raise ConfigError([f"--staging-mib {staging_mib}: {error}"]) from None
    # Trainers hold BF16 and FP8, replicas their copy; plain sends have buffers at both ends.
    shapes = [shape for rank in range(source.world) for shape in local_shapes(spec, source, rank).values()]
    held = sum(2 * math.prod(shape) for shape in shapes)
    need, free = 1.5 * held + 3 * replicas * plan.total_bytes, psutil.virtual_memory().available
    if device == "cpu" and need > free:
        raise ConfigError(
            [f"--cpu: about {need / GB:.1f} GB of memory are needed and {free / GB:.1f} are free; fewer --layers "
             f"(of {spec.num_layers}) or --replicas need less"]
        )  # fmt: skip


def run_all(commands: list[list[str]]) -> str:
    """Run commands that work together; what the first of them prints. When one fails the others are killed.

    Raises:
        OSError: one failed; the end of its log is printed first.
    """
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        output = stack.enter_context(tempfile.TemporaryFile("w+"))
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        running: list[subprocess.Popen] = []
        try:
            for command, log in zip(commands, logs):
                out = output if not running else log
                running.append(subprocess.Popen([*command, str(os.getpid())], stdout=out, stderr=log, env=env))
            codes = [None]
            while None in codes and not any(codes):
                time.sleep(0.1)
                codes = [process.poll() for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        if failed := [(code, rank) for rank, code in enumerate(codes) if code]:
            code, rank = min(failed)  # one that was killed comes first: the others complain that it is gone
            log = logs[rank]
            log.seek(0)
            print("".join(log.readlines()[-LOG_LINES:]), end="", file=sys.stderr)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            short = "; is there enough memory?" if code == -signal.SIGKILL else ""
            raise OSError(f"bench refit: process {rank} of {len(running)} {how}{short}")
        output.seek(0)
        return output.read()


class Bench:
    """One process of the comparison."""

    def __init__(self, settings: dict, rank: int):
        self.rank, self.rounds = rank, settings["rounds"]
        self.spec = load_model_spec(settings["config"])
        self.source, self.replica = Layout("megatron", **settings["source"]), Layout("vllm", **settings["replica"])
        trainers, nodes = self.source.world, tuple(range(1, settings["replicas"] + 1))
        self.places = Places((0,) * trainers, nodes, self.replica.world, settings["hosts"])
        self.receivers = list(range(trainers, self.places.members))
        self.device = torch.device(settings["device"])
        if self.device.type == "cuda":
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)
        self.fp8 = quantized_tensors(self.spec, self.source, self.replica)
        wait = timedelta(seconds=WAIT_S)
        store = dist.TCPStore("127.0.0.1", settings["port"], None, rank == 0, wait, wait_for_workers=False)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=self.places.members, timeout=wait)
        # Rank 0 broadcasts to the replicas alone.
        self.group = dist.new_group([0, *self.receivers])
        self.talk = dist.new_group(backend="gloo")
        self.bf16 = shard(self.spec, self.source, rank, self.device) if rank < trainers else {}
        self.tensors = quantized(self.spec, self.source, rank, self.bf16, self.fp8) if rank < trainers else {}
        refit = RefitConfig(staging_mib=settings["staging_mib"], timeout_s=WAIT_S)
        self.member = Member(self.spec, self.source, self.replica, self.fp8, self.places, rank, self.device, refit)
        self.member.open()
        self.member.close()  # of segments, whose names nobody needs; so none is left whatever ends this process
        for dst in self.member.receives if self.device.type == "cuda" else ():
            self.member.parameters[dst] = [empty_parameters(self.member, dst)]
        box = [0]
        if rank == 0:
            self.store = Store("127.0.0.1", 0, WAIT_S, lead=True)
            box = [self.store.port]
        dist.broadcast_object_list(box, src=0)
        if rank:
            self.store = Store("127.0.0.1", box[0], WAIT_S, lead=False)
        self.member.peers = Peers(self.store, range(self.places.members), rank, 0, self.device)
        # Where each tensor's pieces are, the first holder of each; and where the replicas want them.
        self.held: dict[str, dict[tuple[int, int], tuple[int, Any]]] = {}
        for holder in range(trainers):
            for piece in pieces(self.spec, self.source, holder):
                self.held.setdefault(piece.hf_name, {}).setdefault(piece.hf_start, (holder, piece))
        # What travels between each pair, and a buffer of each size.
        self.pairs: dict[tuple[int, int], int] = {}
        for dst in range(self.member.plan.dst.world):
            for transfer in self.member.plan.receives(dst):
                pair = transfer.src_rank, self.places.receiver(dst)
                self.pairs[pair] = self.pairs.get(pair, 0) + transfer.nbytes
        self.flat: dict[int, Tensor] = {}
        self.wanted: dict[str, list[tuple[int, Any]]] = {}
        for dst in self.member.receives:
            for piece in pieces(self.spec, self.replica, dst % self.places.tp):
                self.wanted.setdefault(piece.hf_name, []).append((dst, piece))

    def run(self) -> dict:
        plan, ways = self.member.plan, {}
        expected = None
        all_ways = {
            "ours": self.ours,
            "gather + BF16": self.gather_bf16,
            "gather + FP8": self.gather_fp8,
            "plain sends": self.plain,
        }
        for name, way in all_ways.items():
            times = []
            for _ in range(self.rounds + 1):
                self._meet()
                started = time.perf_counter()
                moved, staging = way()
                self._meet()
                times.append(time.perf_counter() - started)
            found = self.landed()
            expected = expected or found
            if found != expected:
                raise RuntimeError(f"{name} left other bytes in the replicas")
            sums = torch.tensor([moved, 0])
            dist.all_reduce(sums)
            most = torch.tensor([staging])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            ways[name] = {"moved": int(sums[0]), "staging": int(most), "seconds": statistics.median(times[1:])}
        return {"ways": ways, "bound": plan.total_bytes}

    def ours(self) -> tuple[int, int]:
        return self.member.exchange(self.tensors).payload, self.member.peer_to_peer.staging

    def plain(self) -> tuple[int, int]:
        peers, sent, works = self.member.peers, 0, []
        assert peers is not None
        for (src, receiver), nbytes in self.pairs.items():
            if self.rank in (src, receiver):
                if nbytes not in self.flat:
                    self.flat[nbytes] = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
                send, other = self.rank == src, receiver if self.rank == src else src
                works.append((peers.send if send else peers.receive)(self.flat[nbytes], other))
                sent += nbytes if send else 0
        for work in works:
            peers.finish(work)
        return sent, 0

    def gather_bf16(self) -> tuple[int, int]:
        moved = staging = 0
        for name, info in self.spec.tensors().items():
            whole, sent = self._whole(name, self.bf16, info.shape, torch.bfloat16, 1)
            moved, staging = moved + sent, max(staging, whole.nbytes)
            if name in self.wanted:
                if name in self.fp8:
                    again = quant_weight(whole)
                    self._place(name, again.codes, "", 1)
                    self._place(name, again.scale, SCALE_SUFFIX, 128)
                else:
                    self._place(name, whole, "", 1)
        return moved, staging

    def gather_fp8(self) -> tuple[int, int]:
        moved = staging = 0
        for name, info in self.spec.tensors().items():
            parts = [("", torch.bfloat16, 1, info.shape)]
            if name in self.fp8:
                parts = [
                    ("", torch.float8_e4m3fn, 1, info.shape),
                    (SCALE_SUFFIX, torch.float32, 128, scale_shape(*info.shape)),
                ]
            for suffix, dtype, unit, shape in parts:
                whole, sent = self._whole(name, self.tensors, shape, dtype, unit, suffix)
                moved, staging = moved + sent, max(staging, whole.nbytes)
                if name in self.wanted:
                    self._place(name, whole, suffix, unit)
        return moved, staging

    def _whole(self, name: str, tensors: dict, shape: tuple, dtype, unit: int, suffix: str = "") -> tuple[Tensor, int]:
        """A whole tensor on rank 0 and the replicas, and how many bytes this rank sent for it."""
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        sent = 0
        for holder, piece in self.held[name].values():
            at, start, size = _in_units(piece, unit)
            if self.rank == holder:
                part = cut(tensors[piece.local_name + suffix], at, size)
                if holder == 0:
                    cut(whole, start, size).copy_(part)
                else:
                    part = part.contiguous().view(-1).view(torch.uint8)
                    dist.send(part, 0)
                    sent += part.nbytes
            elif self.rank == 0:
                place = cut(whole, start, size)
                buffer = torch.empty(place.numel() * whole.itemsize, dtype=torch.uint8, device=self.device)
                dist.recv(buffer, holder)
                place.copy_(buffer.view(dtype).view(place.shape))
        if self.rank == 0 or self.rank in self.receivers:
            dist.broadcast(whole.view(-1).view(torch.uint8), 0, group=self.group)
            sent += whole.nbytes * len(self.receivers) if self.rank == 0 else 0
        return whole, sent

    def _place(self, name: str, whole: Tensor, suffix: str, unit: int) -> None:
        for dst, piece in self.wanted[name]:
            at, start, size = _in_units(piece, unit)
            target = cut(self.member.view(dst, piece.local_name + suffix), at, size)
            target.copy_(cut(whole, start, size))

    def landed(self) -> list[dict[str, int]]:
        """Digests of what this receiver's engines hold."""
        return [
            rank_digests(
                self.spec, self.replica, t, {s.name: self.member.view(dst, s.name) for s in self.member.whole[t]}
            )
            for dst in self.member.receives
            for t in [dst % self.places.tp]
        ]

    def _meet(self) -> None:
        """All processes are here, and their GPUs have nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self.talk)


def empty_parameters(member: Member, dst: int) -> dict[str, Tensor]:
    """Parameters of an engine's rank on a GPU, all zero."""
    slots = member.whole[dst % member.places.tp]
    return {s.name: torch.zeros(s.shape, dtype=DTYPES[s.dtype], device=member.device) for s in slots}


def _in_units(piece: Piece, unit: int) -> tuple[Rectangle, Rectangle, Rectangle]:
    """Start in the local tensor, start in the whole one, and size; in tiles of a scale tensor with `unit` 128."""
    at, start, size = (
        (-(-pair[0] // unit), -(-pair[1] // unit)) for pair in (piece.local_start, piece.hf_start, piece.size)
    )
    return at, start, size


def shard(spec: ModelSpec, layout: Layout, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Random BF16 parameters of a trainer rank; copies on other ranks are equal."""
    found = {
        name: torch.zeros(shape, dtype=torch.bfloat16, device=device)
        for name, shape in local_shapes(spec, layout, rank).items()
    }
    for number, piece in enumerate(pieces(spec, layout, rank)):
        generator = torch.Generator(device).manual_seed(hash((piece.hf_start, number % 7)) & 0xFFFF)
        place = cut(found[piece.local_name], piece.local_start, piece.size)
        place.copy_(torch.randn(place.shape, generator=generator, device=device) * 0.02)
    return found


def quantized(spec: ModelSpec, layout: Layout, rank: int, bf16: dict[str, Tensor], fp8: set[str]) -> dict[str, Tensor]:
    """The same as the trainer holds it: FP8 tensors as codes and scales."""
    names = {piece.local_name for piece in pieces(spec, layout, rank) if piece.hf_name in fp8}
    found = dict(bf16)
    for name in names:
        made = quant_weight(bf16[name])
        found[name], found[name + SCALE_SUFFIX] = made.codes, made.scale
    return found


def main(settings: dict, rank: int) -> None:
    torch.set_num_threads(1)
    bench = Bench(settings, rank)
    with torch.no_grad():
        result = bench.run()
    bench.member.leave()
    if rank == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    watch_parent(int(sys.argv[3]))
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
