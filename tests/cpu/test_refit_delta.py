"""Only what changed is sent, and the result is what sending everything would have given."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from refit_world import DENSE, Namespaces, collect, fork, local_tensors, random_model, spec_of, torch_world, whole

from jetrl_conversion.layout import Layout
from jetrl_conversion.planner import quantized_tensors
from jetrl_megatron.config import RefitConfig
from jetrl_megatron.refit.digests import merge_digests, rank_digests
from jetrl_megatron.refit.member import Member
from jetrl_megatron.refit.packs import STRIP
from jetrl_megatron.refit.peers import Peers, Store, TransferFailed
from jetrl_megatron.refit.places import Places

SPEC = spec_of(DENSE)
SOURCE, REPLICA, PLACES = Layout("megatron"), Layout("vllm"), Places((0,), (1,), 1)
FP8 = quantized_tensors(SPEC, SOURCE, REPLICA)


def versions() -> list[dict[str, torch.Tensor]]:
    """Random; one byte in four hundred changed; all changed; nothing changed."""
    first = local_tensors(SPEC, SOURCE, 0, whole(random_model(SPEC, 1), FP8))
    second = {name: tensor.clone() for name, tensor in first.items()}
    generator = torch.Generator().manual_seed(0)
    for tensor in second.values():
        flat = tensor.view(-1).view(torch.uint8)
        flat[torch.randint(flat.numel(), (flat.numel() // 400,), generator=generator)] ^= 1
    third = local_tensors(SPEC, SOURCE, 0, whole(random_model(SPEC, 2), FP8))
    return [first, second, third, third]


def body(rank: int, address: str, port: int) -> list:
    torch_world(rank, 2, address, port)
    member = Member(
        SPEC, SOURCE, REPLICA, FP8, PLACES, rank, torch.device("cpu"),
        RefitConfig(staging_mib=1, timeout_s=8.0, delta=True),
    )  # fmt: skip
    member.open()
    member.peers = Peers(Store(address, port + 1, 8.0, lead=rank == 0), (0, 1), rank, 0, torch.device("cpu"))
    seen: list = []
    for version, tensors in enumerate(versions()):
        moved = member.exchange(tensors if rank == 0 else {}, base=version - 1 if version else None)
        if rank:
            live = {slot.name: member.view(0, slot.name) for slot in member.slots[0]}
            seen.append(merge_digests([rank_digests(SPEC, REPLICA, 0, live)]))
        else:
            seen.append((moved.wire, merge_digests([rank_digests(SPEC, SOURCE, 0, tensors)])))
        dist.barrier()
    # The sender builds on version 3, this receiver holds another: nothing may be put together from the two.
    try:
        member.exchange(versions()[0] if rank == 0 else {}, base=3 if rank == 0 else 2)
    except TransferFailed as error:
        seen.append(str(error))
    dist.barrier()
    member.close()
    return seen


@pytest.mark.timeout(120)
def test_a_delta_gives_the_same_bytes():
    results = multiprocessing.get_context("fork").Queue()
    processes = fork(2, Namespaces(0, "", ""), body, 29740, results=results)
    found = collect(processes, results, 100)
    assert all(isinstance(value, list) for value in found.values()), found
    sent, received = found[0], found[1]
    assert [digests for _, digests in sent[:4]] == received[:4]
    assert received[0] != received[1] != received[2] == received[3]
    full, few, all_new, nothing = (wire for wire, _ in sent[:4])
    marks = full / STRIP
    assert few < 0.25 * full, "one byte in 400: at most one strip in twelve, and a mark for each"
    assert full <= all_new <= full + marks, "whole packs where a delta does not pay"
    assert nothing < 1.1 * marks
    assert "a delta on version 3, and this receiver holds 2" in received[4]


def test_no_delta_where_bytes_land_in_engines_parameters():
    """An engine that was started again holds no version to build on."""
    config = RefitConfig(delta=True)
    on_gpu = Member(SPEC, SOURCE, REPLICA, FP8, PLACES, 0, torch.device("cuda"), config)
    assert on_gpu.placed == {0} and not on_gpu.peer_to_peer.delta
    assert Member(SPEC, SOURCE, REPLICA, FP8, PLACES, 0, torch.device("cpu"), config).peer_to_peer.delta
