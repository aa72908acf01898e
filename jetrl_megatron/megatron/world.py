"""The trainer's world: process groups, seeds, and waits that end."""

from __future__ import annotations

import datetime
import os
import socket

import torch
import torch.distributed as dist

from jetrl_megatron.collective import from_all
from jetrl_megatron.config import Config, ConfigError
from jetrl_megatron.env_list import differences, numerics
from jetrl_megatron.megatron import patches
from jetrl_megatron.rollout.remote import MARGIN_S


def device_for(config: Config) -> torch.device:
    """The device of this rank: `cuda:LOCAL_RANK` where there is one, unless the config says `cpu`."""
    wanted = config.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("train.device=cuda, and torch sees no CUDA device on this machine")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def initialize(config: Config) -> torch.device:
    """Join the world that torchrun started and build Megatron's process groups.

    Reads RANK, WORLD_SIZE and LOCAL_RANK. Every collective that waits longer than `train.timeout_s` fails, but in the
    world's own group, where ranks wait for what the first one asks of engines: that may take as long as engines may.

    Raises:
        RuntimeError: when the world's size is not the recipe's tp x pp x cp x dp.
        ConfigError: the GPU, or what is installed, cannot run the recipe (all problems).
    """
    device = device_for(config)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != config.parallel.world_size:
        raise RuntimeError(
            f"the recipe needs tp x pp x cp x dp = {config.parallel.world_size} ranks and was started with {world}"
        )
    if device.type == "cpu":
        torch.set_num_threads(config.train.threads)
        patches.enable_cpu()
    else:
        torch.cuda.set_device(device)
        from jetrl_megatron.megatron.gpu import requirements

        requirements.check(config)
    engines = max(config.rollout.start_timeout_s, config.rollout.call_timeout_s) + 2 * MARGIN_S
    timeout = datetime.timedelta(seconds=max(config.train.timeout_s, engines))
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timeout)

    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.parallel.tp,
            pipeline_model_parallel_size=config.parallel.pp,
            context_parallel_size=config.parallel.cp,
            expert_model_parallel_size=config.parallel.ep,
            distributed_timeout_minutes=max(1, round(config.train.timeout_s / 60)),
            # Also on GPUs: the distributed optimizer gathers its state for checkpoints over gloo.
            create_gloo_process_groups=True,
        )
    _check_environments()
    tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed + 1)
    return device


def _check_environments() -> None:
    """Ranks on different hosts may get different variables: those that change numbers must be the same everywhere.

    Raises:
        ConfigError: naming each variable, its values, and which ranks have them.
    """
    mine = {name: os.environ[name] for name in numerics() if name in os.environ}
    problems = differences(dict(from_all((f"rank {dist.get_rank()} on {socket.gethostname()}", mine))))
    if problems:
        raise ConfigError(problems)


def shutdown() -> None:
    """Leave the world; safe to call twice."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
