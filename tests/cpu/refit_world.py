"""Worlds of forked processes that send each other weights: random tensors in a trainer's layout, no Megatron, no vLLM.

Each process lives in one of several network namespaces where that is possible (root, `ip`), else all share loopback.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_conversion.layout import Layout, local_shapes, pieces
from jetrl_conversion.model_spec import ModelSpec, load_model_spec
from jetrl_kernels.formats import scale_shape
from jetrl_megatron.refit.message import SCALE_SUFFIX
from jetrl_megatron.refit.rectangles import cut

DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return load_model_spec(config)


def random_model(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Random bytes by Hugging Face name, as BF16 (`name`) and as FP8 (`name!`, `name!_scale_inv`)."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, info in spec.tensors().items():
        shape = info.shape
        found[name] = torch.randint(-9999, 9999, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
        if info.quantized:
            codes = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            found[name + "!"] = codes.view(torch.float8_e4m3fn)
            found[name + "!" + SCALE_SUFFIX] = torch.randn(scale_shape(*shape), generator=generator)
    return found


def whole(model: Mapping[str, Tensor], fp8: Collection[str]) -> dict[str, Tensor]:
    """The model with some tensors in FP8, as `rank_digests` takes it."""
    found = {}
    for name in (n for n in model if "!" not in n):
        found[name] = model[name + "!"] if name in fp8 else model[name]
        if name in fp8:
            found[name + SCALE_SUFFIX] = model[name + "!" + SCALE_SUFFIX]
    return found


def local_tensors(spec: ModelSpec, layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a rank of `layout` holds of a whole model."""
    shapes = local_shapes(spec, layout, rank)
    found: dict[str, Tensor] = {}
    for piece in pieces(spec, layout, rank):
        source, name = tensors[piece.hf_name], piece.local_name
        local = found.setdefault(name, torch.zeros(shapes[name], dtype=source.dtype))
        cut(local, piece.local_start, piece.size).copy_(cut(source, piece.hf_start, piece.size))
        scales = tensors.get(piece.hf_name + SCALE_SUFFIX)
        if scales is not None:
            at, start, size = (
                tuple(-(-n // 128) for n in pair) for pair in (piece.local_start, piece.hf_start, piece.size)
            )
            local = found.setdefault(name + SCALE_SUFFIX, torch.zeros(scale_shape(*shapes[name])))
            cut(local, at, size).copy_(cut(scales, start, size))  # type: ignore[arg-type]
    return found


class Namespaces:
    """Network namespaces on one bridge; `count` 0 where they cannot be made."""

    def __init__(self, count: int, tag: str, net: str):
        self.count, self.tag, self.net = count, tag, net
        self.home = os.open("/proc/self/ns/net", os.O_RDONLY)
        """Where the other ends of the cables are."""

    def name(self, index: int) -> str:
        return f"jr{self.tag}-{index}"

    def enter(self, index: int) -> str:
        """Move this process into a namespace; its address there."""
        if not self.count:
            return "127.0.0.1"
        fd = os.open(f"/run/netns/{self.name(index)}", os.O_RDONLY)
        os.setns(fd, os.CLONE_NEWNET)
        os.close(fd)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        return self.address(index)

    def address(self, index: int) -> str:
        return f"{self.net}.{10 + index}" if self.count else "127.0.0.1"

    def link(self, index: int, state: str) -> None:
        """Cut (`down`) or mend (`up`) a namespace's cable: packets vanish, no connection is closed."""
        command = ["ip", "link", "set", f"jr{self.tag}v{index}", state]
        subprocess.run(command, check=True, preexec_fn=lambda: os.setns(self.home, os.CLONE_NEWNET))


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[Namespaces]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        yield Namespaces(0, "", "")
        return
    spaces = Namespaces(count, secrets.token_hex(2), f"10.214.{secrets.randbelow(250)}")
    bridge = f"jr{spaces.tag}"

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=not check)

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for i in range(count):
            space, outside = spaces.name(i), f"jr{spaces.tag}v{i}"
            ip("netns", "add", space)
            ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outside, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"{spaces.address(i)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield spaces
    finally:
        for i in range(count):
            ip("netns", "del", spaces.name(i), check=False)
        ip("link", "del", bridge, check=False)


def fork(size: int, spaces: Namespaces, body: Callable[..., Any], *arguments: Any, results: Any) -> list:
    """Start `body(rank, address of rank 0, *arguments)` in `size` forked processes, dealt over the namespaces in runs.

    Exceptions go into the queue `results` as (rank, text), return values as (rank, value).
    """
    context = multiprocessing.get_context("fork")

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        spaces.enter(rank * max(1, spaces.count) // size)
        try:
            value: Any = body(rank, spaces.address(0), *arguments)
        except BaseException:
            value = "".join(traceback.format_exc())
        results.put((rank, value))
        results.close()
        results.join_thread()
        os._exit(0)

    started = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for process in started:
        process.start()
    return started


def collect(processes: list, results: Any, timeout: float) -> dict[int, Any]:
    """Values by rank of all processes that returned one before the time-out; the rest is killed."""
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(processes) and time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            rank, value = results.get(timeout=0.5)
            found[rank] = value
        if results.empty() and not any(p.is_alive() for p in processes):
            time.sleep(0.2)
            if results.empty():
                break
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join(10)
    return found


def torch_world(rank: int, size: int, address: str, port: int, timeout_s: float = 60.0) -> None:
    """A gloo world for the test's own bookkeeping."""
    store = dist.TCPStore(address, port, size, rank == 0, timedelta(seconds=timeout_s))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
