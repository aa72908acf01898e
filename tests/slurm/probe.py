"""A stand-in for the trainer: two ranks a node through the same rendezvous, signals and launcher as `jetrl train`.

probe.py sum FOLDER         all-reduce over all ranks; rank 0 prints the sum and which hosts took part
probe.py fail FOLDER        the last rank raises while the others wait for it
probe.py count FOLDER N     count to N, a step every 0.5 s, from the number saved in FOLDER; save when asked to stop
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from jetrl_megatron import signals

WAIT_S = 900
"""Longest wait of one rank for another: a job that ends sooner did not run into it."""


def rank(what: str, folder: Path, *args: str) -> int:
    import torch
    import torch.distributed as dist

    signals.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_S))
    me, world = dist.get_rank(), dist.get_world_size()
    if what == "sum":
        total = torch.tensor([float(me)])
        dist.all_reduce(total)
        hosts: list[str | None] = [None] * world
        dist.all_gather_object(hosts, socket.gethostname())
        if me == 0:
            print(f"sum {total.item():.0f} over {world} ranks on {','.join(map(str, hosts))}", flush=True)
    elif what == "fail":
        if me == world - 1:
            raise ValueError(f"planted fault on rank {me}")
        dist.barrier()
    elif what == "count":
        state = folder / "count"
        n = int(state.read_text()) if state.exists() else 0
        while n < int(args[0]):
            n += 1
            time.sleep(0.5)
            stop = torch.tensor([int(signals.stop_requested() is not None)])
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if me == 0:
                print(f"count {n}", flush=True)
            if stop.item():
                if me == 0:
                    state.write_text(str(n))
                dist.barrier()
                return signals.REQUEUE_EXIT_CODE
    dist.destroy_process_group()
    return 0


def main() -> int:
    from jetrl_megatron.launcher import RunFailed, run_ranks
    from jetrl_megatron.slurm_env import world_from_env

    try:
        return run_ranks([__file__, *sys.argv[1:]], world_from_env(), 2, WAIT_S, Path(sys.argv[2]))
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        sys.exit(record(rank)(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
    sys.exit(main())
