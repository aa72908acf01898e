"""Every trainer layout to every set of replicas: equal bytes, no byte twice, and nobody holds more than its own part.

One world of eight processes in four network namespaces runs all combinations, one after another.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from refit_world import DENSE, MOE, collect, fork, local_tensors, namespaces, random_model, spec_of, torch_world, whole

from jetrl_conversion.layout import Layout, pieces
from jetrl_conversion.model_spec import ModelSpec
from jetrl_conversion.planner import quantized_tensors
from jetrl_megatron.collective import from_all
from jetrl_megatron.config import RefitConfig
from jetrl_megatron.refit import packs
from jetrl_megatron.refit.digests import differing, merge_digests, rank_digests
from jetrl_megatron.refit.member import MIB, Member
from jetrl_megatron.refit.peers import Peers, Store
from jetrl_megatron.refit.places import Places

WORLD, NODES = 8, 4
STRAIGHT = 16 << 10
"""Of these small models' rectangles, so that some go from tensor to tensor and some through buffers."""
MODELS = {"dense": DENSE, "moe": MOE}


class Case(NamedTuple):
    model: str
    tp: int
    pp: int
    ep: int
    replicas: int
    rollout_tp: int
    rollout_ep: int

    @property
    def replica(self) -> Layout:
        return Layout("vllm", tp=self.rollout_tp, ep=self.rollout_ep)

    @property
    def source(self) -> Layout:
        """Experts are cut over as many ranks as fit into the world."""
        wide = Layout("megatron", tp=self.tp, pp=self.pp, ep=self.ep)
        return wide if wide.world <= WORLD else Layout("megatron", tp=self.tp, pp=self.pp, ep=self.ep, etp=self.tp // 2)

    @property
    def places(self) -> Places:
        """Replicas on nodes of their own where processes are left for their hosts, else on the trainers' nodes."""
        ranks, each = self.source.world, self.replica.world
        for hosts in (each, 1):
            if ranks + self.replicas * hosts <= WORLD:
                return Places((0,) * ranks, tuple(range(1, self.replicas + 1)), each, hosts)
        return Places(tuple(r * NODES // ranks for r in range(ranks)), tuple(range(self.replicas)), each)


CASES = [
    Case(model, tp, pp, ep, replicas, rollout_tp, rollout_ep)
    for model in MODELS
    for tp in (1, 2, 4)
    for pp in (1, 2)
    for ep in ((1, 2) if model == "moe" else (1,))
    for replicas in (1, 2, 3)
    for rollout_tp in (1, 2)
    for rollout_ep in ((1, 2) if model == "moe" else (1,))
]


loaded: dict[str, tuple[ModelSpec, dict]] = {}
"""Spec and random weights of each model; made before the fork."""


@functools.lru_cache
def held(name: str, source: Layout, rank: int, fp8: frozenset[str]) -> dict[str, torch.Tensor]:
    spec, model = loaded[name]
    return local_tensors(spec, source, rank, whole(model, fp8)) if rank < source.world else {}


@functools.lru_cache
def digests_of_all(name: str, fp8: frozenset[str]) -> dict[str, int]:
    spec, model = loaded[name]
    return merge_digests([rank_digests(spec, Layout("hf"), 0, whole(model, fp8))])


def body(rank: int, address: str, port: int, cases: list[Case]) -> list[str]:
    torch_world(rank, WORLD, address, port)
    store = Store(address, port + 1, 30.0, lead=rank == 0)
    peers = Peers(store, range(WORLD), rank, 0, torch.device("cpu"))
    problems = []
    packs.STRAIGHT = STRAIGHT
    for case in cases:
        try:
            problems += [f"{case}: {problem}" for problem in run(rank, case, loaded[case.model][0], peers)]
        except Exception as error:
            raise RuntimeError(f"{case}: {error}") from error
    dist.barrier()
    return problems


def run(rank: int, case: Case, spec: ModelSpec, peers: Peers) -> list[str]:
    source, places, replica = case.source, case.places, case.replica
    fp8 = quantized_tensors(spec, source, replica)
    tensors = held(case.model, source, rank, frozenset(fp8))
    member = None
    if rank < places.members:
        member = Member(
            spec, source, replica, fp8, places, rank, torch.device("cpu"), RefitConfig(staging_mib=1, timeout_s=30.0)
        )
    paths = {k: v for part in from_all(member.open() if member else {}) for k, v in part.items()}
    payload, digests, problems = 0, {}, []
    if member is not None:
        member.attach(paths)
        member.peers = peers
        payload = member.exchange(tensors).payload
        kinds = {pack.straight for pack in member.peer_to_peer.packs if pack.src == 0}
        if rank == 0 and case.replicas == 3 and kinds != {True, False}:
            problems.append(f"straight packs, and others: {kinds}")
        if member.peer_to_peer.staging > MIB:
            problems.append(f"rank {rank} has {member.peer_to_peer.staging} bytes of buffers")
    from_all(None)  # nobody looks before all have written
    if member is not None:
        for first in [dst for dst in member.receives if dst % places.tp == 0]:
            landed = [
                {slot.name: member.view(first + t, slot.name) for slot in member.slots[t]} for t in range(places.tp)
            ]
            digests[first] = merge_digests(rank_digests(spec, replica, t, live) for t, live in enumerate(landed))
        own = sum(segment.bytes.nbytes for segment in member._owned)
        engines = sum(-(-s.nbytes // 256) * 256 for dst in member.receives for s in member.slots[dst % places.tp])
        if own > engines:
            problems.append(f"rank {rank} has landing places of {own} bytes for engines that hold {engines}")
    moved, found = sum(from_all(payload)), from_all(digests)
    if rank == 0:
        assert member is not None
        bound = sum(least_bytes(spec, replica, t, fp8) for t in range(places.tp)) * len(places.copies)
        if not moved == bound == member.plan.total_bytes:
            problems.append(f"{moved} bytes moved, the plan says {member.plan.total_bytes}, the replicas hold {bound}")
        expected = digests_of_all(case.model, frozenset(fp8))
        copies = {k: v for part in found for k, v in part.items()}
        if len(copies) != len(places.copies):
            problems.append(f"digests of {len(copies)} copies of {len(places.copies)}")
        problems += [f"copy {k} differs in {names[:3]}" for k, v in copies.items() if (names := differing(expected, v))]
    if member is not None:
        member.peers = None
        member.close()
    return problems


def least_bytes(spec: ModelSpec, layout: Layout, rank: int, fp8: set[str]) -> int:
    """What one replica rank holds of the model, counted from its pieces alone."""
    total = 0
    for piece in pieces(spec, layout, rank):
        rows, cols = piece.size
        scales = 4 * -(-rows // 128) * -(-cols // 128)
        total += rows * cols + scales if piece.hf_name in fp8 else 2 * rows * cols
    return total


@pytest.mark.timeout(300)
def test_every_layout_to_every_set_of_replicas():
    for name, config in MODELS.items():
        spec = spec_of(config)
        loaded[name] = (spec, random_model(spec, 1))
        assert len(quantized_tensors(spec, Layout("megatron", tp=4, pp=2), Layout("vllm", tp=2))) > 10
    results = multiprocessing.get_context("fork").Queue()
    started = time.monotonic()
    with namespaces(NODES) as spaces:
        processes = fork(WORLD, spaces, body, 29610, CASES, results=results)
        found = collect(processes, results, 280)
    print(f"{len(CASES)} combinations in {time.monotonic() - started:.1f} s")
    for rank, said in found.items():
        assert not said, f"rank {rank}: {said}"
    assert len(found) == WORLD
