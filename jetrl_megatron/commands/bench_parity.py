"""`jetrl bench parity`: what exact parity costs in rollout and training, and which operation costs it, on one GPU.

Baseline is the same engine and trainer without what exact parity adds: vLLM's own attention schedule, which splits long
contexts as the batch suggests, attention over all keys at once in the trainer, and log-probs from one pass over the
logits, unchecked.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

KV_GIB = 12.0
"""KV cache of an engine: four sequences of 16,384 tokens of Qwen3-8B need 9.2."""

STEPS = {"8 x 2048 tokens": (8, 2048, 2), "1 x 16384 tokens": (1, 16384, 1)}
"""Training steps: sequences, tokens of each, micro-batches."""


def parity(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder; its config.json alone is enough.")],
    batch: Annotated[list[str], typer.Option(help="Rollouts: sequences x prompt x new tokens.")] = [  # noqa: B006
        "32x256x512",
        "4x15360x1024",
    ],
    layers: Annotated[int, typer.Option(help="Layers that the trainer keeps: as many as fit.")] = 8,
) -> None:
    """Cost of exact parity against mode jetrl without it. Example: jetrl bench parity models/Qwen3-8B"""
    from jetrl_megatron.config import Config, ConfigError
    from jetrl_megatron.megatron.gpu.requirements import problems

    if found := problems(Config()):
        raise ConfigError(found)
    common = {"model": str(model.absolute()), "batches": batch, "layers": layers}
    exact, without, train, operations = _children(
        ("rollout", {**common, "splits": False}),
        ("rollout", {**common, "splits": True}),
        ("train", common),
        ("operations", common),
    )
    result = {"rollout": {"exact": exact, "without": without}, "train": train, "operations": operations}
    for name in batch:
        ours, base = (result["rollout"][side][name] for side in ("exact", "without"))
        print(f"rollout {name:14} {ours:9.0f} tok/s, without {base:9.0f}: {100 * (base / ours - 1):+.1f} % time")
    for name, sides in result["train"].items():
        ours, base = sides["exact"], sides["without"]
        print(f"training step {name:16} {ours:9.4f} s, without {base:9.4f}: {100 * (ours / base - 1):+.1f} % time")
    for name, (ours, base) in result["operations"].items():
        print(f"  {name:58} {1e6 * ours:9.1f} us, without {1e6 * base:9.1f}")
    print(json.dumps(result))


def _children(*tasks: tuple[str, dict]) -> list[dict]:
    """Results of tasks in processes of their own, which start together and measure one at a time.

    Each holds the lock shared while it sets up and alone while it measures (`_my_turn`).
    """
    with tempfile.NamedTemporaryFile() as lock:
        started = []
        for task, settings in tasks:
            with open(lock.name) as shared:  # held by the child's copy from here on
                fcntl.flock(shared, fcntl.LOCK_SH)
                command = [sys.executable, "-m", __name__, task, json.dumps({**settings, "lock": shared.fileno()})]
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[shared.fileno()]))
        outputs = [process.communicate()[0] for process in started]
    failed = [f"{task} with {process.returncode}" for (task, _), process in zip(tasks, started) if process.returncode]
    if failed:
        raise OSError(f"bench parity failed: {', '.join(failed)}; their logs are above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _my_turn(settings: dict) -> None:
    """Wait until no other task sets up or measures; the lock goes with the process."""
    fcntl.flock(settings["lock"], fcntl.LOCK_EX)


def measure_rollout(s: dict) -> dict[str, float]:
    """Tokens a second of each batch: the better of two runs after a short one that warms up."""
    from jetrl_megatron.commands.bench_gpu import random_parameters, rollout_seconds, set_environment

    set_environment(own_process=False)
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_megatron.config import Config, ModelConfig, RolloutConfig
    from jetrl_megatron.layouts import fp8_tensors
    from jetrl_megatron.rollout.client import engine_settings
    from jetrl_megatron.rollout.engine import Engine

    batches = {name: tuple(map(int, name.split("x"))) for name in s["batches"]}
    config = Config(
        model=ModelConfig(path=s["model"], max_length=max(p + n for _, p, n in batches.values()) + 2),
        rollout=RolloutConfig(
            max_num_seqs=max(count for count, _, _ in batches.values()),
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.0,
            memory_gib=KV_GIB,
            colocated=False,
        ),
    )
    settings = engine_settings(s["model"], config, fp8_tensors(load_model_spec(s["model"]), config), cpu=False)
    llm = Engine(dataclasses.replace(settings, attention_splits=s["splits"])).llm
    llm.apply_model(random_parameters)
    _my_turn(s)
    found = {}
    for name, (count, prompt, new) in batches.items():
        seconds = [rollout_seconds(llm, count, prompt, tokens, i) for i, tokens in enumerate((16, new, new))]
        found[name] = count * new / min(seconds[1:])
    return found


def measure_train(s: dict) -> dict[str, dict[str, float]]:
    """Seconds of each of `STEPS`, exact and without, in turn: medians of five after two."""
    import torch

    import jetrl_megatron.megatron.forward as forward
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_megatron.batch import Sample, micro_batches
    from jetrl_megatron.commands import one_rank
    from jetrl_megatron.config import Config, ModelConfig, TrainConfig
    from jetrl_megatron.megatron import gpu
    from jetrl_megatron.parity import Guard

    with tempfile.TemporaryDirectory() as folder:
        model = one_rank.largest_layers(load_model_spec(s["model"]), s["layers"], Path(folder))
        longest = max(length for _, length, _ in STEPS.values())
        config = Config(model=ModelConfig(path=str(model), max_length=longest), train=TrainConfig(device="cuda"))
        trainer, spec = one_rank.trainer_of(config, training=True)

    def batches_of(count: int, length: int, pieces: int) -> list:
        ids = torch.randint(spec.vocab_size, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
        samples = [
            Sample(prompt_ids=x[:256], response_ids=x[256:], engine_logp=[-12.0] * (length - 256), policy_version=0,
                   group=0, finish_reason="length", advantage=1.0)
            for x in ids
        ]  # fmt: skip
        made = micro_batches(samples, [list(range(count))], 0, count // pieces, 128)
        return [b.to(trainer.device) for b in made]

    def loss(batch, logp, entropy):
        value = -(logp * batch.mask * batch.advantages).mean()
        return value, {"loss": value.detach()}

    class Counting(Guard):
        """Made-up engine log-probs all differ: compare them, and go on."""

        def check(self, batches) -> None:
            from jetrl_megatron import parity, parity_search

            parity.first_differing(0, self._batches, self._logps)
            parity_search.earliest(None)

    _my_turn(s)
    whole, attention = forward.fused_logprob, sys.modules[gpu.attention.__module__]
    sides = {"exact": (whole, attention.PART), "without": (lambda *a, **k: whole(*a, **{**k, "whole": False}), 1 << 30)}
    found: dict[str, dict[str, float]] = {}
    for name, sizes in STEPS.items():
        batches = batches_of(*sizes)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(7):
            for side, times in seconds.items():
                forward.fused_logprob, attention.PART = sides[side]  # type: ignore[assignment]
                guard = Counting(trainer, None, lambda: None)
                watched = (guard.watch(loss), guard.check) if side == "exact" else (loss, None)
                torch.cuda.synchronize()
                started = time.perf_counter()
                trainer.step(batches, *watched)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
        found[name] = {side: statistics.median(times[2:]) for side, times in seconds.items()}
    return found


def measure_operations(s: dict) -> dict[str, tuple[float, float]]:
    """Operation -> seconds (exact, without) of one call at the model's sizes."""
    import torch

    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_kernels.fused_logprob import kernel

    spec = load_model_spec(s["model"])
    _my_turn(s)
    found: dict[str, tuple[float, float]] = {}
    for count, context in ((32, 768), (256, 768), (4, 16384), (1, 16384)):
        cut, free = _decode(spec, count, context)
        found[f"attention of one layer, {count} sequences decode at {context}"] = (_time(cut), _time(free))
    for lengths in ([2048] * 4, [16384]):
        cut, free = _packed(spec, lengths)
        name = f"attention of one layer, forward of {len(lengths)} x {lengths[0]} packed tokens"
        found[name] = (_time(cut), _time(free))
    z = torch.randn(1664, spec.vocab_size, device="cuda")
    targets = torch.randint(spec.vocab_size, (z.shape[0],), device="cuda")
    once = _time(lambda: kernel.statistics(z, targets, 0, 1.0))
    again = _time(lambda: kernel.token_logprob(z, targets, 1.0))
    found["log-softmax of 1664 trained tokens"] = (once + again, once)
    return found


def _decode(spec: Any, count: int, context: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(as an engine for 16,384 tokens decodes in exact mode, as vLLM does); of CUDA graphs, as in the engine."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from jetrl_megatron.engine_ops.flash_attention import DecodeCuts, cut_decode, parts_of

    page, dim = 16, spec.head_dim
    pages = count * context // page
    cache = torch.randn(pages, page, spec.num_kv_heads, 2 * dim, device="cuda", dtype=torch.bfloat16)
    k, v = cache.split(dim, -1)
    q = torch.randn(count, spec.num_heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    table = torch.randperm(pages, device="cuda").int().view(count, -1)
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((count,), context, device="cuda", dtype=torch.int32)
    cuts = DecodeCuts.empty(count, parts_of(16384), page, "cuda")
    cuts.fill(lengths, table)
    cuts = cuts.first(count, lengths)
    return (
        _graph(lambda: cut_decode(q, k, v, cuts, dim**-0.5, out)),
        _graph(
            lambda: flash_attn_varlen_func(
                q=q, k=k, v=v, max_seqlen_q=1, max_seqlen_k=context, cu_seqlens_q=starts, seqused_k=lengths,
                causal=True, softmax_scale=dim**-0.5, block_table=table, fa_version=3, num_splits=0, out=out,
            )
        ),
    )  # fmt: skip


def _packed(spec: Any, lengths: list[int]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(the trainer's forward, the same over all keys at once)."""
    import torch

    from jetrl_megatron.engine_ops.flash_attention import flash_attention
    from jetrl_megatron.megatron import gpu

    heads, dim = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), spec.head_dim
    q, k, v = (torch.randn(sum(lengths), n, dim, device="cuda", dtype=torch.bfloat16) for n in heads)
    starts, longest = torch.tensor([0, *lengths], device="cuda").cumsum(0).int(), max(lengths)
    return (
        lambda: gpu.attention(q, k, v, starts, dim**-0.5, longest),
        lambda: flash_attention(
            q, k, v, dim**-0.5, causal=True, starts=starts, starts_k=starts, longest=longest, longest_k=longest
        ),
    )


def _graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """Replay of a captured call."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _time(call: Callable[[], Any]) -> float:
    """Median seconds of 30 calls, each behind a write of 256 MB that empties the cache."""
    import torch

    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    pairs = []
    for _ in range(35):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs[5:]) / 1000


if __name__ == "__main__":
    tasks = {"rollout": measure_rollout, "train": measure_train, "operations": measure_operations}
    print(json.dumps(tasks[sys.argv[1]](json.loads(sys.argv[2]))), flush=True)
    os._exit(0)
