"""`jetrl bench rollout|train`: ratios on one GPU, every engine or mode in a process of its own, in turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

OURS = ("jetrl", "bf16")
ENGINES = (*OURS, "vllm-bf16", "vllm-fp8")
"""Ours in two modes, and stock vLLM in BF16 and in its own block FP8."""
KV_GIB = 32.0
"""KV cache of every engine: 256 sequences of 768 tokens of Qwen3-8B need 27."""
TRAINERS = ("jetrl", "jetrl-fp8-param", "te", "bf16", "bf16-te")
"""Ours in FP8, also without BF16 weights, TE in FP8 (blockwise), Megatron's BF16 linears, TE's BF16 linears (gradient
accumulated in the GEMM)."""

Model = Annotated[
    Path, typer.Argument(help="Hugging Face folder; its config.json alone is enough, weights are random.")
]


def rollout(
    model: Model,
    engine: Annotated[list[str], typer.Option(help=f"Of {', '.join(ENGINES)}; all by default.")] = [],  # noqa: B006
    sequences: Annotated[list[int], typer.Option(help="Batch sizes.")] = [32, 256],  # noqa: B006
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 256,
    new: Annotated[int, typer.Option(help="Tokens sampled after each.")] = 512,
    own_process: Annotated[
        bool | None,
        typer.Option(
            "--own-process/--in-process",
            help="Where vLLM's engine core runs. By default ours runs as in training, in its engine's process, and "
            "stock vLLM as its users run it, in a process of its own.",
        ),
    ] = None,
) -> None:
    """Generated tokens a second, sampled as in training: a seed for each answer, log-probs of its tokens.

    Example: jetrl bench rollout models/Qwen3-8B
    """
    common: dict = {"model": str(model.absolute()), "sequences": sequences, "prompt": prompt, "new": new}
    if own_process is not None:
        common["own_process"] = own_process
    results = {
        name: child(__name__, "rollout", {**common, "engine": name}) for name in _chosen(engine, ENGINES, "--engine")
    }
    base = results.get("bf16") or results.get("vllm-bf16")
    for name, result in results.items():
        for n in map(str, sequences):
            ratio = f"{result[n] / base[n]:.3f}x BF16" if base else ""
            where = "own process" if result["own_process"] else "in-process"
            print(f"{name:10} {where:11} {n:>4} sequences  {result[n]:9.0f} tok/s  {ratio}")
    print(json.dumps(results))


def train(
    model: Model,
    layers: Annotated[int, typer.Option(help="Layers to keep: as many as fit; 20 of Qwen3-8B need 118 GiB.")] = 20,
    tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch.")] = 8192,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 4,
    mode: Annotated[list[str], typer.Option(help=f"Of {', '.join(TRAINERS)}; all by default.")] = [],  # noqa: B006
) -> None:
    """Forward, backward and optimizer step. Example: jetrl bench train models/Qwen3-8B --layers 20"""
    common = {
        "model": str(model.absolute()),
        "layers": layers,
        "tokens": tokens,
        "length": length,
        "micro": micro_batches,
    }
    results = {name: child(__name__, "train", {**common, "mode": name}) for name in _chosen(mode, TRAINERS, "--mode")}
    base = results.get("bf16-te") or results.get("bf16")
    for name, r in results.items():
        ratio = f"{base['step_seconds'] / r['step_seconds']:.3f}x BF16" if base else ""
        print(
            f"{name:8} step {r['step_seconds']:.4f} s  forward+backward {r['forward_backward_seconds']:.4f} s  "
            f"peak {r['peak_gib']:.1f} GiB  {r['tokens_per_second']:.0f} tok/s  {ratio}"
        )
    print(json.dumps(results))


def _chosen(names: list[str], known: tuple[str, ...], option: str) -> list[str]:
    from jetrl_megatron.config import ConfigError, nearest

    if unknown := [n for n in names if n not in known]:
        raise ConfigError([f"{option} {n}: unknown, {nearest(n, known)}" for n in unknown])
    need_gpu()
    return names or list(known)


def need_gpu() -> None:
    """Raise ConfigError with everything that this machine lacks."""
    from jetrl_megatron.config import Config, ConfigError
    from jetrl_megatron.megatron.gpu.requirements import problems

    if found := problems(Config()):
        raise ConfigError(found)


def child(module: str, task: str, settings: dict) -> dict:
    run = subprocess.run([sys.executable, "-m", module, task, json.dumps(settings)], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise OSError(f"bench {task} {settings} failed with exit status {run.returncode}; its log is above")
    return json.loads(run.stdout.splitlines()[-1])


def measure_rollout(s: dict) -> dict:
    """Tokens a second for each batch size: the better of two runs after one that warms up; seconds of all three."""
    ours = s["engine"] in OURS
    own_process = s.get("own_process", not ours)
    set_environment(own_process, ours=ours)
    length, most = s["prompt"] + s["new"], max(s["sequences"])
    llm = _our_llm(s, length, most) if ours else stock_llm(s, length, most)
    llm.apply_model(random_parameters)
    wait_for_turn(s)
    found: dict = {"own_process": own_process, "rounds": {}}
    for n in s["sequences"]:
        times = [rollout_seconds(llm, n, s["prompt"], new, i) for i, new in enumerate((16, s["new"], s["new"]))]
        found["rounds"][str(n)] = times
        found[str(n)] = n * s["new"] / min(times[1:])
    if own_process:  # it would outlive this one, with the GPU's memory
        llm.llm_engine.engine_core.shutdown()
    return found


def set_environment(own_process: bool, *, ours: bool = True) -> None:
    """This process's variables become those of a training run's engine; before anything imports torch or vLLM.

    Args:
        own_process: give vLLM's engine core a process of its own, which in training it has not.
        ours: load our plug-in.
    """
    from jetrl_megatron.config import RolloutConfig
    from jetrl_megatron.rollout.environment import engine_environment

    os.environ |= engine_environment(RolloutConfig().threads, cpu=False)
    if own_process:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `random_parameters` travels to that process
        }
    if not ours:
        os.environ["VLLM_PLUGINS"] = "none"


def rollout_seconds(llm: Any, count: int, prompt: int, new: int, round_: int) -> float:
    """Seconds in which a vLLM.LLM samples `count` answers of `new` tokens as in training.

    Prompts of `prompt` tokens are others in each round, so that nothing comes from the prefix cache.
    """
    import torch
    from vllm.inputs import TokensPrompt

    from jetrl_megatron.rollout.engine import request_parameters
    from jetrl_megatron.rollout.types import Sampling

    ids = torch.randint(1000, (count, prompt), generator=torch.Generator().manual_seed(round_)).tolist()
    sampling = Sampling(temperature=1.0, max_tokens=new, stop_token_ids=())
    asked = [request_parameters(sampling, seed) for seed in range(count)]
    started = time.perf_counter()
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in ids], asked, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == new for output in outputs)
    return seconds


def stock_llm(s: dict, length: int, most: int, **options: Any):
    """vLLM without our plug-in, dummy weights; `options` as LLM takes them."""
    from vllm import LLM

    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return LLM(
        model=s["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=length,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.01,
        kv_cache_memory_bytes=int(s.get("kv_gib", KV_GIB) * 2**30),
        compilation_config={"cudagraph_capture_sizes": sorted({1, 8, *s["sequences"], *range(32, most + 1, 32)})},
        hf_overrides={"quantization_config": block} if s["engine"] == "vllm-fp8" else {},
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **options,
    )


def _our_llm(s: dict, length: int, most: int):
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_megatron.config import Config, ModelConfig, PrecisionConfig, RolloutConfig
    from jetrl_megatron.layouts import fp8_tensors
    from jetrl_megatron.rollout.client import engine_settings
    from jetrl_megatron.rollout.engine import Engine

    config = Config(
        model=ModelConfig(path=s["model"], max_length=length),
        precision=PrecisionConfig(mode=s["engine"]),
        rollout=RolloutConfig(
            max_num_seqs=most,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.0,
            memory_gib=s.get("kv_gib", KV_GIB),
            max_response_tokens=s["new"],
            colocated=False,
        ),
    )
    spec = load_model_spec(s["model"])
    return Engine(engine_settings(s["model"], config, fp8_tensors(spec, config), cpu=False)).llm


def random_parameters(model) -> None:
    """Gaussian weights of plausible size in place of vLLM's dummy ones, whose near-zero codes would save power."""
    import torch

    for name, p in model.named_parameters():
        if p.dtype == torch.float8_e4m3fn:
            p.data.copy_(torch.randn(p.shape, device=p.device).mul_(100).clamp_(-448, 448).to(p.dtype))
        elif "scale" in name:
            p.data.fill_(2.0**-13)
        elif p.dim() > 1:
            p.data.normal_(0.0, p.shape[-1] ** -0.5)
        else:
            p.data.fill_(0.0 if name.endswith("bias") else 1.0)


def wait_for_turn(s: dict) -> None:
    """Hold the lock file `lock`, if one is named, until this process ends: several may start together, one measures."""
    if "lock" in s:
        import fcntl

        s["held"] = Path(s["lock"]).open("w")  # noqa: SIM115  closed, and so released, when the process ends
        fcntl.flock(s["held"], fcntl.LOCK_EX)


def measure_train(s: dict) -> dict[str, float]:
    """Medians of five steps after two; memory is what torch reserved at most."""
    import torch

    # Imports are slow and need no GPU: before the turn.
    import jetrl_megatron.megatron.trainer
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_megatron.batch import Sample, micro_batches
    from jetrl_megatron.commands import one_rank
    from jetrl_megatron.config import Config, ModelConfig, PrecisionConfig, TrainConfig

    if s["mode"].endswith("te"):
        import jetrl_megatron.megatron.gpu.te  # noqa: F401
    wait_for_turn(s)
    with tempfile.TemporaryDirectory() as folder:
        model = one_rank.largest_layers(load_model_spec(s["model"]), s["layers"], Path(folder))
        config = Config(
            model=ModelConfig(path=str(model), max_length=s["length"]),
            precision=PrecisionConfig(
                mode="bf16" if s["mode"].startswith("bf16") else "jetrl",
                linear_backend="te" if s["mode"].endswith("te") else "jetrl",
                fp8_param=s["mode"].endswith("fp8-param"),
            ),
            train=TrainConfig(device="cuda"),
        )
        trainer, spec = one_rank.trainer_of(config, training=True)
    generator = torch.Generator().manual_seed(0)
    per_batch = s["tokens"] // s["length"]
    samples = []
    for _ in range(per_batch * s["micro"]):
        ids = torch.randint(spec.vocab_size, (s["length"],), generator=generator).tolist()
        samples.append(
            Sample(prompt_ids=ids[:256], response_ids=ids[256:], engine_logp=[-12.0] * (len(ids) - 256),
                   policy_version=0, group=0, finish_reason="length", advantage=1.0)
        )  # fmt: skip
    batches = micro_batches(samples, [list(range(len(samples)))], 0, per_batch, 128)
    batches = [b.to(trainer.device) for b in batches]
    total = sum(len(x.response_ids) for x in samples)

    def loss(batch, logp, entropy):
        value = -(logp * batch.mask * batch.advantages).sum() / total
        return value, {"loss": value.detach()}

    steps, passes = [], []
    for _ in range(7):
        steps.append(timed(lambda: trainer.step(batches, loss)))
    peak = torch.cuda.max_memory_reserved() / 2**30
    for _ in range(4):
        trainer.model.zero_grad_buffer()
        passes.append(timed(lambda: trainer._run(batches, loss)))
    seconds = statistics.median(steps[2:])
    return {
        "step_seconds": seconds,
        "forward_backward_seconds": statistics.median(passes[1:]),
        "tokens_per_second": len(batches) * s["tokens"] / seconds,
        "peak_gib": peak,
        "layers": s["layers"],
        "tokens": len(batches) * s["tokens"],
    }


def timed(run) -> float:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    task, given = sys.argv[1], json.loads(sys.argv[2])
    print(
        json.dumps({"rollout": measure_rollout, "train": measure_train}[task](given)),
        flush=True,
    )
    sys.stdout.flush()
    os._exit(0)
