"""Two GPUs as two nodes: a trainer rank on one sends to a receiver on the other by NCCL, in chunks.

The code is that of the gloo tests with tensors on GPUs. Compared with a plain NCCL send of as many bytes in the same
run, and with gathering BF16, broadcasting it and quantizing again.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time

import pytest
import torch

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(600)]

PLAIN, RIVAL = 0.8, 5.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bytes_arrive_at_the_speed_of_the_link():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, str(port)]
    running = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=500)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], outputs
    found = json.loads(outputs[0].splitlines()[-1])
    assert found["digests_equal"]
    assert found["refit"] < found["plain"] / PLAIN, found
    assert found["rival"] > RIVAL * found["refit"], found


def main(port: int, rank: int) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    from jetrl_conversion.known_models import known_config
    from jetrl_conversion.layout import Layout
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_conversion.planner import quantized_tensors
    from jetrl_kernels.quant_weight import quant_weight
    from jetrl_megatron.commands.bench_refit_cpu import quantized, shard
    from jetrl_megatron.config import RefitConfig
    from jetrl_megatron.refit.digests import merge_digests, rank_digests
    from jetrl_megatron.refit.member import Member
    from jetrl_megatron.refit.peers import Store
    from jetrl_megatron.refit.places import Places

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=120), wait_for_workers=False)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2)
    spec = load_model_spec(known_config("Qwen3-8B") | {"num_hidden_layers": 8})
    source, replica = Layout("megatron"), Layout("vllm")
    fp8 = quantized_tensors(spec, source, replica)
    member = Member(spec, source, replica, fp8, Places((0,), (1,), 1), rank, device, RefitConfig(timeout_s=60.0))
    member.open()
    box = [0]
    if rank == 0:
        meeting = Store("127.0.0.1", 0, 60.0, lead=True)
        box = [meeting.port]
    dist.broadcast_object_list(box, src=0)
    if rank:
        meeting = Store("127.0.0.1", box[0], 60.0, lead=False)
    member.join(meeting, (0, 1), 0)
    bf16, tensors = {}, {}
    if rank == 0:
        bf16 = {name: t.to(device) for name, t in shard(spec, source, 0).items()}
        tensors = quantized(spec, source, 0, bf16, fp8)
    # An engine's parameters stand at the receiving end: every chunk is copied there, as the engine does.
    live = {s.name: torch.zeros(s.shape, dtype=_dtype(s), device=device) for s in member.whole[0]} if rank else {}

    def refit() -> None:
        for chunk in range(member.chunks):
            member.exchange(tensors, chunk=chunk)
            if rank:
                for slot in member.slots[0]:
                    if slot.chunk == chunk:
                        live[slot.name].copy_(member.view(0, slot.name))
            torch.cuda.synchronize()
            dist.barrier()

    flat = torch.zeros(member.plan.total_bytes, dtype=torch.uint8, device=device)

    def plain() -> None:
        dist.send(flat, 1) if rank == 0 else dist.recv(flat, 0)

    def rival() -> None:
        for name, info in spec.tensors().items():
            whole = torch.zeros(info.shape, dtype=torch.bfloat16, device=device)
            dist.broadcast(whole, 0)
            if rank and name in fp8:
                quant_weight(whole)

    seconds = {name: _median(way) for name, way in (("refit", refit), ("plain", plain), ("rival", rival))}
    ours = rank_digests(spec, source, 0, tensors) if rank == 0 else rank_digests(spec, replica, 0, live)
    both = [None, None]
    dist.all_gather_object(both, merge_digests([ours]))
    if rank == 0:
        print(
            json.dumps({**seconds, "digests_equal": both[0] == both[1], "bytes": member.plan.total_bytes}), flush=True
        )
    member.close()
    os._exit(0)


def _dtype(slot) -> torch.dtype:
    from jetrl_megatron.refit.message import DTYPES

    return DTYPES[slot.dtype]


def _median(way) -> float:
    import torch.distributed as dist

    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        way()
        torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
