"""Every patch this project makes, written for Megatron-core 0.19 and refused with another.

`quiet_checkpoint_writer`: a synchronous save collects its results through a queue in a process that it starts for
this (11 s with torch to import, and left behind by a rank that is killed). It writes by threads, so a plain queue does.

`enable_cpu`: Megatron-core asks `torch.cuda` for devices, streams and random states in some sixty places and offers no
switch for the CPU. It does nothing where CUDA is available. Reasons, one by one:

* `device="cuda"` and `torch.cuda.current_device()` become the CPU device: parameters and buffers are allocated so.
* `Tensor.type()` reports `torch.cuda.*`: both optimizers refuse parameters whose type has another name.
* `current_stream` / `synchronize` / `empty_cache` do nothing: pipeline schedules call them.
* a checkpoint's optimizer state has no per-parameter `step` (it lies in the parameter groups), which loading into
  torch's Adam, used where neither TE nor apex is installed, does not expect.
* random states come from the CPU generator: the model-parallel tracker forks "CUDA" states for dropout and init.
"""

from __future__ import annotations

import contextlib
import queue
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MEGATRON_VERSION = "0.19"
_mode: TorchFunctionMode | None = None


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        elif func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """Stands where a CUDA stream is asked for; on a CPU every operation is in order."""

    cuda_stream = 0

    def wait_stream(self, other) -> None: ...

    def wait_event(self, event) -> None: ...

    def synchronize(self) -> None: ...


def _check_version() -> None:
    import megatron.core

    if not megatron.core.__version__.startswith(MEGATRON_VERSION):
        raise RuntimeError(
            f"written for megatron-core {MEGATRON_VERSION}.x, and {megatron.core.__version__} is installed: "
            f"read {__file__} against its sources first"
        )


def quiet_checkpoint_writer() -> None:
    """Let synchronous saves of distributed checkpoints stay in this process."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    _check_version()
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]


def enable_cpu() -> None:
    """Make Megatron-core usable on this CPU; does nothing when CUDA is available or when already enabled."""
    global _mode
    if _mode is not None or torch.cuda.is_available():
        return
    warnings.filterwarnings("ignore", message=".*Apex is not installed.*")
    import megatron.core.tensor_parallel.random as mcore_random

    _check_version()
    cpu, stream = torch.device("cpu"), _Stream()
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda stream=None: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]
    mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, param, tensors: original(
        self, param, {"step": None, **tensors}
    )
    mode = _mode = _CudaMeansCpu()
    mode.__enter__()


def disable_cpu() -> None:
    """Leave the function mode (the replaced `torch.cuda` functions stay); for tests that share one process."""
    global _mode
    if _mode is not None:
        _mode.__exit__(None, None, None)
        _mode = None
