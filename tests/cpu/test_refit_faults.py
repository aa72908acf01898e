"""Transfers that die half-way: who is left gets the whole version, who is not is out, and nobody waits for ever.

Two trainer ranks send to two host processes, each host on a node (a network namespace) of its own. Members are killed,
and a cable is cut, when the third pack is on its way. No engines: what they would be told to load is looked at instead.
With `placed` bytes land, as on GPUs, in what engines show of their parameters; here it is the host's own memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from refit_world import DENSE, Namespaces, fork, local_tensors, namespaces, random_model, spec_of, torch_world, whole
from torch.multiprocessing.reductions import StorageWeakRef

from jetrl_conversion.layout import Layout
from jetrl_conversion.planner import quantized_tensors
from jetrl_megatron.config import Config, RefitConfig
from jetrl_megatron.refit import member as member_module
from jetrl_megatron.refit import packs
from jetrl_megatron.refit.digests import merge_digests, rank_digests
from jetrl_megatron.refit.member import Member
from jetrl_megatron.refit.message import DTYPES, plan_slots
from jetrl_megatron.refit.peers import Peers, TransferFailed
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.route import Route
from jetrl_megatron.rollout import remote
from jetrl_megatron.rollout.agent import connect, serve
from jetrl_megatron.rollout.host import METHODS, Host
from jetrl_megatron.rollout.pool import EnginePool
from jetrl_megatron.rollout.remote import Hub, RemoteEngine, RemoteHost
from jetrl_megatron.rollout.types import EngineDied

TIMEOUT_S = 4.0
SPEC = spec_of(DENSE)
SOURCE, REPLICA = Layout("megatron", tp=2), Layout("vllm")
FP8 = quantized_tensors(SPEC, SOURCE, REPLICA)
PLACES = Places((0, 0), (1, 2), 1)
VERSIONS = [random_model(SPEC, seed) for seed in range(5)]
DIGESTS = [merge_digests([rank_digests(SPEC, Layout("hf"), 0, whole(model, FP8))]) for model in VERSIONS]


def member(number: int, way: str) -> Member:
    config = RefitConfig(staging_mib=1, timeout_s=TIMEOUT_S, delta=way == "delta")
    made = Member(SPEC, SOURCE, REPLICA, FP8, PLACES, number, torch.device("cpu"), config)
    if way == "placed":
        made.placed = set(range(len(PLACES.destinations)))
    return made


def parameters_of(_: str) -> dict[str, torch.Tensor]:
    """In place of mapping a GPU: the parameters that an engine has when it starts."""
    slots = plan_slots(SPEC, REPLICA, 0, FP8)
    return {slot.name: torch.zeros(slot.shape, dtype=DTYPES[slot.dtype]) for slot in slots}


def engines(way: str, *names: str) -> dict[int, list[str]]:
    """Tables of the engines there are; a name begins with its node."""
    if way != "placed":
        return {}
    nodes = {PLACES.destinations.index(int(name[0])) for name in names}
    return {dst: [n for n in names if int(n[0]) == PLACES.destinations[dst]] for dst in nodes}


class Faulty(Peers):
    """Connections of a process that does something to itself when its third pack is under way."""

    fault: ClassVar[list[Callable[[], None]]] = []
    started = 0

    def _start(self, operation, buffer, peer):
        work = super()._start(operation, buffer, peer)
        Faulty.started += 1
        if Faulty.started == 3:
            for fault in Faulty.fault:
                fault()
        return work


member_module.Peers = Faulty  # type: ignore[misc]
packs.STRAIGHT = 16 << 10  # of this small model, so that rectangles under way go from tensor to tensor and in packs


def arm(*fault: Callable[[], None]) -> None:
    """For the next transfer of this process."""
    Faulty.fault[:], Faulty.started = fault, 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_gpu() -> None:
    raise torch.AcceleratorError("an error that ends the context")


class Watched(Host):
    """A host that also says what an engine would find."""

    def digests(self) -> dict[str, int]:
        (dst,) = self.member.receives
        live = {slot.name: self.member.view(dst, slot.name) for slot in self.member.slots[0]}
        found = [rank_digests(SPEC, REPLICA, 0, held) for held in [live, *self.member.parameters.get(dst, [])]]
        assert all(one == found[0] for one in found), "replicas of a node hold the same"
        return merge_digests(found[:1])

    def mapped(self) -> int:
        """How many of the engines' parameters that were mapped at the first call still are."""
        if not hasattr(self, "known"):
            tables = self.member._tables.values()
            self.known = [StorageWeakRef(tensor.untyped_storage()) for table in tables for tensor in table.values()]
        return sum(not storage.expired() for storage in self.known)

    def die_next(self, fault: Callable[[], None]) -> None:
        """In the next transfer."""
        arm(fault)


def number(node: int) -> int:
    return 2 + PLACES.hosts.index(node)


def host(node: int, address, way: str, queue) -> None:
    member_module.published = parameters_of  # type: ignore[assignment]
    watched = Watched(member(number(node), way))
    connection = connect(lambda: address, ("host", number(node)), 30)
    queue.put(("closed", node, serve(watched, METHODS | {"digests", "die_next", "mapped"}, connection)))
    queue.close()
    queue.join_thread()


class Lead:
    """Rank 0's side of the test: a pool without engines, and the route."""

    def __init__(self, hub: Hub, way: str):
        config = Config(refit=RefitConfig(timeout_s=TIMEOUT_S))
        config.rollout.start_timeout_s = 30.0
        self.pool = EnginePool([], hub, {number(n): RemoteHost(number(n), n, hub, config) for n in PLACES.hosts})
        self.route = Route(member(0, way), self.pool)

    def ask(self, node: int, method: str, *arguments):
        self.pool.hosts[number(node)].begin(method, *arguments)
        return self.pool.hosts[number(node)].finish(method)

    def lose_engine(self, node: int) -> None:
        """What the pool does before a version when a node's engine is out of rotation (and nobody can start it)."""
        self.pool.engines = [RemoteEngine(0, node, self.pool.hub, Config())]  # type: ignore[arg-type]
        self.pool._lost[0] = EngineDied("killed")
        with pytest.raises(EngineDied, match="its agent is gone"):
            self.pool.expose({})
        self.pool.engines = []

    def held(self) -> dict[int, int]:
        """Node -> which version its landing place holds whole, -1 for none; of the nodes that take part."""
        found = {node: self.ask(node, "digests") for node in sorted(self.route.reached)}
        return {node: DIGESTS.index(value) if value in DIGESTS else -1 for node, value in found.items()}


def tensors(rank: int, version: int):
    return local_tensors(SPEC, SOURCE, rank, whole(VERSIONS[version], FP8))


TABLES = {2: ("1a", "2b"), 4: ("1c",)}
"""Engines whose parameters are there in a version, where not ("1a", "2a", "2b")."""


def survive(rank: int, address: str, spaces: Namespaces, port: int, way: str, orders, news) -> object:
    """Versions 0 to 4: nothing, a killed receiver, its replacement, a cut cable, a receiver replaced in between."""
    os.environ["MASTER_ADDR"] = address
    torch_world(rank, 2, address, port, timeout_s=90.0)
    if rank == 1:
        route = Route(member(1, way), None)
        for version in range(5):
            route.move(tensors(1, version), version, 0)
            dist.barrier()
        return None
    hub = Hub(address)
    orders.put(hub.address)
    lead, seen, times = Lead(hub, way), [], []
    for version in range(5):
        if version == 1:
            lead.ask(2, "die_next", die if way == "placed" else lose_gpu)
        if version == 2:
            orders.put("replace")
            lead.pool.hosts[number(2)]._remote.start_timeout_s = 30.0
        if version == 3 and spaces.count:
            arm(lambda: spaces.link(2, "down"))
        if version == 4:
            if way == "placed":
                assert lead.ask(1, "mapped") > 0
                lead.lose_engine(1)
                assert lead.ask(1, "mapped") == 0, "a dead engine's memory is free for the next one"
            orders.put("replace")
            until(lambda: ("host", number(1)) in hub._known)
        started = time.monotonic()
        attempts = [engines(way, *TABLES.get(version, ("1a", "2a", "2b")))] * 2
        moved = lead.route.move(tensors(0, version), version, 0, attempts.pop)
        times.append(time.monotonic() - started)
        seen.append((lead.held(), moved.payload, 2 - len(attempts)))
        dist.barrier()
    lead.pool.close()
    return seen, times, lead.route.member.plan.total_bytes


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["placed", "delta"])
def test_survivors_get_every_version(monkeypatch, way):
    monkeypatch.setattr(remote, "LOST_S", 6)
    context = multiprocessing.get_context("fork")
    orders, news, results = context.Queue(), context.Queue(), context.Queue()
    with namespaces(3) as spaces:
        port = 29710 + (way == "delta")
        started = fork(
            2, Namespaces(0, "", ""), survive_in(spaces, 0), spaces, port, way, orders, news, results=results
        )
        try:
            address = orders.get(timeout=60)
            hosts = [start_host(spaces, node, address, way, news) for node in (1, 2)]
            assert orders.get(timeout=90) == "replace"
            hosts[1].join(5)
            assert hosts[1].exitcode == (-signal.SIGKILL if way == "placed" else 1)
            hosts.append(start_host(spaces, 2, address, way, news))
            assert orders.get(timeout=90) == "replace"
            hosts[0].kill()
            hosts.append(start_host(spaces, 1, address, way, news))
            found = dict(results.get(timeout=120) for _ in range(2))
        finally:
            for process in started + hosts:
                process.kill()
    assert not isinstance(found[0], str), found[0]
    seen, times, total = found[0]
    both, one = total, total // 2
    assert seen[0] == ({1: 0, 2: 0}, both, 1)
    assert seen[1] == ({1: 1}, one, 2), "the dead node is out, the other has the new version whole"
    assert seen[2] == ({1: 2, 2: 2}, both, 1), "its replacement gets the current version"
    if spaces.count:
        assert seen[3] == ({1: 3}, one, 2)
        assert times[3] < 3 * TIMEOUT_S + 6 + 5
    assert (seen[4][0][1], seen[4][2]) == (4, 1), "a receiver that was started again in between is known to be another"
    assert times[1] < 3 * TIMEOUT_S, "a dead peer is noticed at once"


def survive_in(spaces: Namespaces, index: int):
    def body(rank: int, _: str, *arguments):
        return survive(rank, spaces.enter(index), *arguments)

    return body


def start_host(spaces: Namespaces, node: int, address, way: str, queue):
    def body() -> None:
        torch.set_num_threads(1)
        spaces.enter(node)
        host(node, address, way, queue)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=body, daemon=True)
    process.start()
    return process


def lose_sender(rank: int, address: str, spaces: Namespaces, port: int, orders, news) -> object:
    os.environ["MASTER_ADDR"] = address
    torch_world(rank, 2, address, port, timeout_s=20.0)
    if rank == 1:
        route = Route(member(1, ""), None)
        route.move(tensors(1, 0), 0, 0)
        arm(die)
        route.move(tensors(1, 1), 1, 0)
    hub = Hub(address)
    orders.put(hub.address)
    lead = Lead(hub, "")
    lead.route.move(tensors(0, 0), 0, 0)
    started = time.monotonic()
    try:
        lead.route.move(tensors(0, 1), 1, 0)
    except (TransferFailed, RuntimeError) as error:
        return type(error).__name__, time.monotonic() - started, lead.route.version
    return "moved", 0.0, lead.route.version


@pytest.mark.timeout(120)
def test_a_killed_sender_ends_the_transfer_for_all():
    context = multiprocessing.get_context("fork")
    orders, news, results = context.Queue(), context.Queue(), context.Queue()
    with namespaces(3) as spaces:

        def body(rank: int, _: str, *arguments):
            return lose_sender(rank, spaces.enter(0), *arguments)

        started = fork(2, Namespaces(0, "", ""), body, spaces, 29720, orders, news, results=results)
        hosts = []
        try:
            address = orders.get(timeout=60)
            hosts = [start_host(spaces, node, address, "", news) for node in (1, 2)]
            rank, value = results.get(timeout=60)
            ended = time.monotonic()
            # Rank 0's process has ended with its answer: the hosts must not outlive it.
            closed = [news.get(timeout=30) for _ in hosts]
            assert time.monotonic() - ended < 3 * TIMEOUT_S
        finally:
            for process in started + hosts:
                process.kill()
    assert rank == 0 and value[0] != "moved" and value[1] < 3 * TIMEOUT_S, value
    assert value[2] is None, "no version is announced"
    assert sorted(closed) == [("closed", 1, False), ("closed", 2, False)]
