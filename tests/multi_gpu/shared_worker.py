"""Workers of a tensor-parallel engine that share one GPU: imported in each of them before its device is chosen.

vLLM maps workers to GPUs by a list, here of the same one; NCCL takes each worker for a host of its own (`ranks.py`).
"""

from __future__ import annotations

import os

from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker

from jetrl_megatron.rollout.weight_transfer import WorkerExtension

os.environ |= {
    "NCCL_HOSTID": f"worker{os.getpid()}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
_init_device = gpu_worker.Worker.init_device


def _on_the_first_gpu(self: gpu_worker.Worker) -> None:
    parallel = self.parallel_config
    parallel.assigned_physical_gpu_ids = [current_platform.device_id_to_physical_device_id(0)] * parallel.world_size
    parallel.disable_custom_all_reduce = True  # by peer access between GPUs
    _init_device(self)


gpu_worker.Worker.init_device = _on_the_first_gpu


class SharedWorker(WorkerExtension):
    """As the engine's own."""
