"""What `jetrl bench refit MODEL` runs: a refit to an engine on the trainer's GPU, and the usual way beside it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_conversion.layout import pieces
from jetrl_conversion.model_spec import load_model_spec
from jetrl_kernels.quant_weight import quant_weight
from jetrl_megatron.commands import one_rank
from jetrl_megatron.commands.bench_gpu import stock_llm, timed, wait_for_turn
from jetrl_megatron.config import Config, ModelConfig, RolloutConfig, TrainConfig
from jetrl_megatron.layouts import fp8_tensors, trainer_layout
from jetrl_megatron.megatron.trainer import Trainer
from jetrl_megatron.refit import ipc, rectangles
from jetrl_megatron.refit.message import SCALE_SUFFIX
from jetrl_megatron.refit.sender import RefitSender
from jetrl_megatron.refit.transports import Way, Ways
from jetrl_megatron.rollout.client import RolloutEngine
from jetrl_megatron.rollout.environment import engine_environment
from jetrl_megatron.rollout.pool import EnginePool
from jetrl_megatron.rollout.types import Sampling

MODULE = "jetrl_megatron.commands.bench_refit_gpu"
DONE = "weights loaded\n"


def measure(s: dict) -> dict:
    """Seconds of a colocated refit (load, both digests, comparison) and, with `stock`, of the usual way.

    With `landing` bytes go through a buffer on the GPU in chunks, as those that come from another node do.
    """
    config = Config(
        model=ModelConfig(path=s["model"], max_length=512),
        rollout=RolloutConfig(
            max_num_seqs=32, gpu_memory_utilization=0.0, memory_gib=4.0, start_timeout_s=600.0,
            enforce_eager=s.get("eager", False),
        ),
        train=TrainConfig(device="cuda"),
    )  # fmt: skip
    spec = load_model_spec(s["model"])
    with tempfile.TemporaryDirectory() as folder:
        engine = RolloutEngine(s["model"], config, quantized=fp8_tensors(spec, config), output=Path(folder), cpu=False)
        pool = EnginePool([engine])
        pool.start()
        try:
            trainer, spec = one_rank.trainer_of(config, training=False)
            if s.get("landing"):
                config.refit.staging_mib = s["landing"]
                Ways.of = lambda *_: Way("nccl", "to measure it")  # type: ignore[method-assign]
            sender = RefitSender(trainer, pool)
            sender.send()
            sampling = Sampling(temperature=1.0, max_tokens=64, stop_token_ids=())
            prompts = [[7 + i, 11, 13, 17] for i in range(16)]
            first = pool.generate(prompts, list(range(16)), sampling)
            wait_for_turn(s)
            refits, cycles, free, equal = [], [], [], True
            for _ in range(s["rounds"]):
                trainer.version += 1
                refits.append(sender.send())
            for _ in range(s.get("cycles", 3)):
                started = time.perf_counter()
                pool.sleep()
                slept = time.perf_counter() - started
                trainer.version += 1
                cycles.append(slept + sender.send().seconds)
                again = pool.generate(prompts, list(range(16)), sampling)
                equal &= all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in zip(first, again))
                free.append(torch.cuda.mem_get_info()[0])

            seconds = statistics.median(report.seconds for report in refits)
            found = {
                "refit_seconds": seconds,
                "refit_seconds_all": [report.seconds for report in refits],
                "trainer_digest_seconds": statistics.median(report.digest_seconds for report in refits),
                "refit_bytes": sender.plan.total_bytes,
                "chunks": sender.member.chunks,
                "quantize_seconds": statistics.median(timed(trainer.quantize) for _ in range(3)),
                "sleep_wake_refit_seconds": statistics.median(cycles),
                "output_unchanged": equal,
                "free_bytes_drift": free[-1] - free[min(1, len(free) - 1)],
            }
        finally:
            pool.close()
    if s.get("stock"):
        found["usual_seconds_all"] = usual(trainer, s["model"], s["rounds"])
        found["usual_seconds"] = statistics.median(found["usual_seconds_all"])
        found["usual_over_ours"] = found["usual_seconds"] / seconds
    return found


def usual(trainer: Trainer, model: str, rounds: int) -> list[float]:
    """Seconds of a refit as it is usually done: gather BF16 in Hugging Face's layout, send, quantize in the engine.

    The engine is stock vLLM with block scales, in its own process: tensors by CUDA IPC, quantized one by one by our
    kernel, loaded by vLLM's reloading of a running model. No digests.
    """
    whole, gather = _hugging_face(trainer)
    table = ipc.publish(whole, "usual")
    env = engine_environment(trainer.config.rollout.threads, cpu=False) | {"VLLM_PLUGINS": "none"}
    command = [sys.executable, "-m", MODULE, "stock", json.dumps({"model": model, "table": str(table)})]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as engine:
            asked, answers = engine.stdin, engine.stdout
            assert asked is not None
            assert answers is not None

            def refit() -> None:
                rectangles.copy(gather)
                torch.cuda.synchronize()
                print("refit", file=asked, flush=True)
                for line in iter(answers.readline, DONE):
                    if not line:
                        raise OSError("the stock engine ended; its log is above")
                    print(line, end="", file=sys.stderr)

            refit()  # starts it
            seconds = [timed(refit) for _ in range(rounds)]
            asked.close()
        return seconds
    finally:
        table.unlink()


def _hugging_face(trainer: Trainer) -> tuple[dict[str, Tensor], rectangles.Copies]:
    """Memory for the model's tensors as Hugging Face names them, and the copies that bring the trainer's there."""
    held = trainer.parameters()
    whole = {
        name: torch.empty(info.shape, dtype=torch.bfloat16, device=trainer.device)
        for name, info in trainer.spec.tensors().items()
    }
    pairs = []
    for piece in pieces(trainer.spec, trainer_layout(trainer.config), 0):
        source = rectangles.cut(held[piece.local_name].detach(), piece.local_start, piece.size)
        pairs.append((rectangles.cut(whole[piece.hf_name], piece.hf_start, piece.size), source))
    return whole, rectangles.copies(pairs)


def serve_stock(s: dict) -> None:
    """Stock vLLM that loads the tensors of a table anew for each line of standard input, and answers with a line."""
    sizes = {"model": s["model"], "engine": "vllm-fp8", "sequences": [8], "kv_gib": 4.0}
    llm = stock_llm(sizes, 512, 8, enforce_eager=True)
    tensors, quantized = ipc.published(s["table"]), fp8_tensors(load_model_spec(s["model"]), Config())
    for _ in sys.stdin:
        llm.collective_rpc(reload, args=(tensors, quantized))
        torch.cuda.synchronize()
        llm.reset_prefix_cache()
        print(DONE, end="", flush=True)


def reload(worker: Any, tensors: Mapping[str, Tensor], quantized: Collection[str]) -> None:
    """Bring Hugging Face tensors into a running stock engine with FP8 block scales, quantizing those that it holds so.

    Args:
        worker: vLLM's, which `collective_rpc` passes.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    def loaded() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            if name in quantized:
                fresh = quant_weight(tensor, "pow2")
                yield name, fresh.codes
                yield name + SCALE_SUFFIX, fresh.scale
            else:
                yield name, tensor

    model = worker.model_runner.model
    initialize_layerwise_reload(model)
    model.load_weights(loaded())
    finalize_layerwise_reload(model, worker.model_config)


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    if sys.argv[1] == "stock":
        serve_stock(settings)
    else:
        print(json.dumps(measure(settings)), flush=True)
    os._exit(0)
