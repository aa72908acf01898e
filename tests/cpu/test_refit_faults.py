"""Transfers that die half-way: who is left gets the whole version, who is not is out, and nobody waits for ever.

Two trainer ranks send to two host processes, each host on a node (a network namespace) of its own. Members are killed,
and a cable is cut, when the third pack is on its way. No engines: what they would be told to load is looked at instead.
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

from jetrl_conversion.layout import Layout
from jetrl_conversion.planner import quantized_tensors
from jetrl_megatron.config import Config, RefitConfig
from jetrl_megatron.refit import member as member_module
from jetrl_megatron.refit.digests import merge_digests, rank_digests
from jetrl_megatron.refit.member import Member
from jetrl_megatron.refit.peers import Peers, TransferFailed
from jetrl_megatron.refit.places import Places
from jetrl_megatron.refit.route import Route
from jetrl_megatron.rollout import remote
from jetrl_megatron.rollout.agent import connect, serve
from jetrl_megatron.rollout.host import METHODS, Host
from jetrl_megatron.rollout.pool import EnginePool
from jetrl_megatron.rollout.remote import Hub, RemoteHost

TIMEOUT_S = 4.0
SPEC = spec_of(DENSE)
SOURCE, REPLICA = Layout("megatron", tp=2), Layout("vllm")
FP8 = quantized_tensors(SPEC, SOURCE, REPLICA)
PLACES = Places((0, 0), (1, 2), 1)
VERSIONS = [random_model(SPEC, seed) for seed in range(5)]
DIGESTS = [merge_digests([rank_digests(SPEC, Layout("hf"), 0, whole(model, FP8))]) for model in VERSIONS]


def member(number: int, delta: bool) -> Member:
    config = RefitConfig(staging_mib=1, timeout_s=TIMEOUT_S, delta=delta)
    return Member(SPEC, SOURCE, REPLICA, FP8, PLACES, number, torch.device("cpu"), config)


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


def arm(*fault: Callable[[], None]) -> None:
    """For the next transfer of this process."""
    Faulty.fault[:], Faulty.started = fault, 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Watched(Host):
    """A host that also says what an engine would find."""

    def digests(self) -> dict[str, int]:
        (dst,) = self.member.receives
        live = {slot.name: self.member.view(dst, slot.name) for slot in self.member.slots[0]}
        return merge_digests([rank_digests(SPEC, REPLICA, 0, live)])

    def die_next(self) -> None:
        """In the next transfer."""
        arm(die)


def number(node: int) -> int:
    return 2 + PLACES.hosts.index(node)


def host(node: int, address, delta: bool, queue) -> None:
    watched = Watched(member(number(node), delta))
    connection = connect(lambda: address, ("host", number(node)), 30)
    queue.put(("closed", node, serve(watched, METHODS | {"digests", "die_next"}, connection)))
    queue.close()
    queue.join_thread()


class Lead:
    """Rank 0's side of the test: a pool without engines, and the route."""

    def __init__(self, hub: Hub, delta: bool):
        config = Config(refit=RefitConfig(timeout_s=TIMEOUT_S))
        config.rollout.start_timeout_s = 30.0
        self.pool = EnginePool([], hub, {number(n): RemoteHost(number(n), n, hub, config) for n in PLACES.hosts})
        self.route = Route(member(0, delta), self.pool)

    def ask(self, node: int, method: str, *arguments):
        self.pool.hosts[number(node)].begin(method, *arguments)
        return self.pool.hosts[number(node)].finish(method)

    def held(self) -> dict[int, int]:
        """Node -> which version its landing place holds whole, -1 for none; of the nodes that take part."""
        found = {node: self.ask(node, "digests") for node in sorted(self.route.reached)}
        return {node: DIGESTS.index(value) if value in DIGESTS else -1 for node, value in found.items()}


def tensors(rank: int, version: int):
    return local_tensors(SPEC, SOURCE, rank, whole(VERSIONS[version], FP8))


def survive(rank: int, address: str, spaces: Namespaces, port: int, delta: bool, orders, news) -> object:
    """Versions 0 to 4: nothing, a killed receiver, its replacement, a cut cable, again nothing."""
    os.environ["MASTER_ADDR"] = address
    torch_world(rank, 2, address, port, timeout_s=90.0)
    if rank == 1:
        route = Route(member(1, delta), None)
        for version in range(5):
            route.move(tensors(1, version), version, 0)
            dist.barrier()
        return None
    hub = Hub(address)
    orders.put(hub.address)
    lead, seen, times = Lead(hub, delta), [], []
    for version in range(5):
        if version == 1:
            lead.ask(2, "die_next")
        if version == 2:
            orders.put("replace")
            lead.pool.hosts[number(2)]._remote.start_timeout_s = 30.0
        if version == 3 and spaces.count:
            arm(lambda: spaces.link(2, "down"))
        started = time.monotonic()
        moved = lead.route.move(tensors(0, version), version, 0)
        times.append(time.monotonic() - started)
        seen.append((lead.held(), moved.payload))
        dist.barrier()
    lead.pool.close()
    return seen, times, lead.route.member.plan.total_bytes


@pytest.mark.timeout(240)
@pytest.mark.parametrize("delta", [False, True])
def test_survivors_get_every_version(monkeypatch, delta):
    monkeypatch.setattr(remote, "LOST_S", 6)
    context = multiprocessing.get_context("fork")
    orders, news, results = context.Queue(), context.Queue(), context.Queue()
    with namespaces(3) as spaces:
        port = 29710 + delta
        started = fork(
            2, Namespaces(0, "", ""), survive_in(spaces, 0), spaces, port, delta, orders, news, results=results
        )
        try:
            address = orders.get(timeout=60)
            hosts = [start_host(spaces, node, address, delta, news) for node in (1, 2)]
            assert orders.get(timeout=90) == "replace"
            hosts[1].join(5)
            assert hosts[1].exitcode == -signal.SIGKILL
            hosts.append(start_host(spaces, 2, address, delta, news))
            found = dict(results.get(timeout=120) for _ in range(2))
        finally:
            for process in started + hosts:
                process.kill()
    assert not isinstance(found[0], str), found[0]
    seen, times, total = found[0]
    both, one = total, total // 2
    assert seen[0] == ({1: 0, 2: 0}, both)
    assert seen[1] == ({1: 1}, one), "the dead node is out, the other has the new version whole"
    assert seen[2] == ({1: 2, 2: 2}, both), "its replacement gets the current version"
    if spaces.count:
        assert seen[3] == ({1: 3}, one)
        assert times[3] < 3 * TIMEOUT_S + 6 + 5
    assert seen[4][0][1] == 4
    assert times[1] < 3 * TIMEOUT_S, "a dead peer is noticed at once"


def survive_in(spaces: Namespaces, index: int):
    def body(rank: int, _: str, *arguments):
        return survive(rank, spaces.enter(index), *arguments)

    return body


def start_host(spaces: Namespaces, node: int, address, delta: bool, queue):
    def body() -> None:
        torch.set_num_threads(1)
        spaces.enter(node)
        host(node, address, delta, queue)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=body, daemon=True)
    process.start()
    return process


def lose_sender(rank: int, address: str, spaces: Namespaces, port: int, orders, news) -> object:
    os.environ["MASTER_ADDR"] = address
    torch_world(rank, 2, address, port, timeout_s=20.0)
    if rank == 1:
        route = Route(member(1, False), None)
        route.move(tensors(1, 0), 0, 0)
        arm(die)
        route.move(tensors(1, 1), 1, 0)
    hub = Hub(address)
    orders.put(hub.address)
    lead = Lead(hub, False)
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
            hosts = [start_host(spaces, node, address, False, news) for node in (1, 2)]
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
