"""How much memory a recipe needs on each GPU, and what forbids it: computed from sizes, nothing is allocated.

Persistent on a trainer rank holding N parameters, N_q of them in FP8 linears, with D = data x context parallel ranks:

    BF16 weights 2 N, FP32 `main_grad` 4 N, FP32 master and two moments 12 N / D (distributed optimizer),
    mode `jetrl`: E4M3 codes, as they are and transposed for DGrad, 2 N_q, and FP32 scales 8 N_q / 128^2,
    with `fp8_param` the BF16 weights are 2 (N - N_q); where D > 1, all 2 N are there during the optimizer step.

Activations that one token leaves behind in one layer (BF16; h hidden, q and k query and key rows, f MLP width; shard
of tensor parallel ranks t; s = t with sequence parallel, else 1):

    8 h / s   inputs of the two norms and of the two column-parallel linears
    (2(q + 2k) + 2(q + k) + 2q + 4 heads) / t   QKV, normed and rotated q and k, attention's output and logsumexp
    6 f / t   gate and up, and their product

With recompute a layer keeps only its input, 2 h / s, and one layer at a time the whole. The pipeline's first stage
holds min(pp, micro-batches) micro-batches. The engine's share is what `gpu_memory_utilization` reserves; what is left
of it beside weights and buffers is KV cache: 4 layers k_local bytes a token. Training and sampling alternate on
colocated GPUs: the engine gives its share back while training (sleep), the trainer keeps its state while sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from jetrl_conversion.errors import ConversionError
from jetrl_conversion.known_models import known_config
from jetrl_conversion.layout import local_shapes
from jetrl_conversion.model_spec import ModelSpec, load_model_spec
from jetrl_conversion.parallel import Layout
from jetrl_conversion.tiles import violations
from jetrl_kernels.formats import BLOCK
from jetrl_megatron import parity
from jetrl_megatron.config import Config, ConfigError
from jetrl_megatron.hardware import GIB, GPUS_PER_NODE, Gpu
from jetrl_megatron.layouts import rollout_layout, trainer_layout

LOGITS_CHUNK = 1 << 28
"""Logits in flight (jetrl_kernels.fused_logprob.CHUNK_LOGITS), each as BF16 and twice as FP32."""
TRAINER_OVERHEAD = 3.0 * GIB
"""CUDA context, NCCL and cuBLAS buffers, allocator slack."""
SLEEPING_ENGINE = 1.5 * GIB
"""CUDA context and graphs of an engine that sleeps."""
ENGINE_BUFFERS = 3.0 * GIB
"""Activations, sampler and CUDA graphs of an engine at work."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest GPU (or CPU process)."""

    weights: float
    codes: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    overhead: float
    gathered: float
    """BF16 weights that exist only during the optimizer step, when there are no activations."""
    engine: float
    """Reserved by the engine while it samples."""
    engine_weights: float
    kv_token: float
    """KV cache of one token on one rollout rank."""
    colocated: bool
    sleeping: float

    @property
    def state(self) -> float:
        return self.weights + self.codes + self.gradients + self.optimizer

    @property
    def training(self) -> float:
        passing = max(self.activations + self.logits, self.gathered)
        return self.state + passing + self.overhead + (self.sleeping if self.colocated else 0.0)

    @property
    def sampling(self) -> float:
        return self.engine + (self.state + self.overhead if self.colocated else 0.0)

    @property
    def peak(self) -> float:
        return max(self.training, self.sampling)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV cache of one replica."""
        return max(0, int((self.engine - self.engine_weights - ENGINE_BUFFERS) / self.kv_token))


def on_cpu(config: Config) -> bool:
    return config.train.device == "cpu" or (config.train.device == "auto" and config.model.path == "tiny")


def spec_of(config: Config) -> ModelSpec:
    """The model's sizes: from its folder if it is there, else from the table of released models.

    Raises:
        ConfigError: neither a folder nor a known name; the nearest name is given.
    """
    path = config.model.path
    try:
        if path == "tiny":
            from jetrl_megatron.tiny import TinySizes, tiny_config

            return load_model_spec(tiny_config(TinySizes()))
        if (Path(path) / "config.json").is_file():
            return load_model_spec(path)
        if (Path(path) / ".metadata").is_file():  # a Megatron checkpoint
            from jetrl_conversion.sources import HF_SUBFOLDER

            return load_model_spec(Path(path) / HF_SUBFOLDER)
        name = Path(path).name
        for suffix in ("-Base", "-Instruct"):
            name = name.removesuffix(suffix)
        return load_model_spec(known_config(name))
    except ConversionError as error:
        raise ConfigError([f"model.path={path}: {line}" for line in str(error).splitlines()]) from None


def gpus(config: Config) -> int:
    """GPUs of the whole run; 0 on CPU."""
    if on_cpu(config):
        return 0
    world, rollout = config.parallel.world_size, config.rollout.tp * config.rollout.replicas
    return max(world, rollout) if config.rollout.colocated else world + rollout


def _on_one_node(config: Config) -> tuple[int, int]:
    """GPUs that training takes of a node that trains, and sampling of one that samples; replicas are spread evenly."""
    p, r = config.parallel, config.rollout
    return p.world_size // p.nodes, -(-r.replicas // (r.nodes or p.nodes)) * r.tp


def gpus_per_node(config: Config) -> int:
    """GPUs of the node that needs most, as Slurm is asked for them; 0 on CPU."""
    if on_cpu(config):
        return 0
    r, (training, sampling) = config.rollout, _on_one_node(config)
    return training + sampling if not r.nodes and not r.colocated else max(training, sampling)


def memory(config: Config, gpu: Gpu | None, spec: ModelSpec | None = None) -> Memory:
    """Memory of the fullest GPU. `gpu` may be None for a recipe that runs on a CPU.

    Raises:
        ConfigError: unknown model; ConversionError: a layout that cannot be built (see `problems`).
    """
    spec = spec or spec_of(config)
    p, layout = config.parallel, trainer_layout(config)
    fp8_train = config.precision.mode == "jetrl"
    stages = [_parameters(spec, layout, stage * layout.inner) for stage in range(p.pp)]
    total, quantized = max(stages)
    rollout_total, rollout_quantized = _parameters(spec, rollout_layout(config), 0)
    fp8_rollout = config.precision.mode != "bf16"
    engine_weights = 2 * rollout_total - (rollout_quantized * (1 - 4 / BLOCK**2) if fp8_rollout else 0)
    cpu = on_cpu(config)
    kv_rows = spec.head_dim * max(1, spec.num_kv_heads // config.rollout.tp)
    kv_token = 4.0 * spec.num_layers * kv_rows
    if gpu is None or cpu or not config.rollout.gpu_memory_utilization:
        engine = engine_weights + config.rollout.memory_gib * GIB + ENGINE_BUFFERS
    else:
        engine = config.rollout.gpu_memory_utilization * gpu.memory
    return Memory(
        weights=2 * (total - quantized) if config.precision.fp8_param else 2 * total,
        codes=quantized * (2 + 8 / BLOCK**2) if fp8_train else 0.0,
        gradients=4 * total,
        optimizer=12 * total / (p.dp * p.cp),
        activations=_activations(config, spec),
        logits=10.0 * min(LOGITS_CHUNK, tokens_per_pass(config) * spec.vocab_size // p.tp),
        gathered=2.0 * total if config.precision.fp8_param and p.dp * p.cp > 1 else 0.0,
        overhead=0.5 * GIB if cpu else TRAINER_OVERHEAD,
        engine=engine,
        engine_weights=engine_weights,
        kv_token=kv_token,
        colocated=config.rollout.colocated and not cpu,
        sleeping=SLEEPING_ENGINE,
    )


def tokens_per_pass(config: Config) -> int:
    """Most tokens in one forward pass on one rank."""
    return config.train.micro_batch_size * config.model.max_length // config.parallel.cp


def micro_batches(config: Config) -> int:
    """Forward passes of one rank in one update."""
    sequences = config.grpo.prompts_per_step * config.grpo.group_size / config.grpo.updates_per_batch
    return max(1, round(sequences / config.parallel.dp / config.train.micro_batch_size))


def _parameters(spec: ModelSpec, layout: Layout, rank: int) -> tuple[int, int]:
    """(all parameters, those of FP8 linears) on one rank, padding included."""
    shapes = local_shapes(spec, layout, rank)
    matrices = {name for name, shape in shapes.items() if len(shape) >= 2}
    plain = ("embed", "output_layer", "lm_head", "router", "mlp.gate.weight")
    quantized = sum(prod(shapes[name]) for name in matrices if not any(word in name for word in plain))
    return sum(map(prod, shapes.values())), quantized


def _activations(config: Config, spec: ModelSpec) -> float:
    p, tokens = config.parallel, tokens_per_pass(config)
    layers, s = spec.num_layers // p.pp, p.tp if p.sequence_parallel else 1
    h, q, k = spec.hidden_size, spec.q_rows, spec.kv_rows
    layer = 8 * h / s + (2 * (q + 2 * k) + 2 * (q + k) + 2 * q + 4 * spec.num_heads) / p.tp
    if spec.num_experts:
        layer += spec.experts_per_token * (4 * h + 6 * spec.moe_ffn) / s
    else:
        layer += 6 * spec.ffn / p.tp
    in_flight = min(p.pp, micro_batches(config))
    kept = layers * in_flight * 2 * h / s + layer if config.model.recompute else layers * in_flight * layer
    ends = 8 * h  # embedding's output, final norm's input and output, gradient of the last
    return tokens * (kept + ends)


def problems(config: Config, gpu: Gpu | None) -> list[str]:
    """Everything that forbids this recipe on this GPU, one line each: layout, tiles, parity, GPUs and nodes, memory."""
    spec = spec_of(config)
    src, dst = trainer_layout(config), rollout_layout(config)
    found = [str(v) for v in violations(spec, src, dst) if v.fatal]
    found += _tile_problems(config, spec, src, dst)
    found += _placement_problems(config, spec, src)
    if not any(v.fatal for v in violations(spec, src, dst)):
        found += parity.problems(config, spec, on_cpu(config))
    if not any(v.fatal for v in violations(spec, src, dst)) and gpu and not on_cpu(config):
        found += _memory_problems(config, gpu, memory(config, gpu, spec))
    if config.model.max_length > spec.max_positions:
        found.append(
            f"model.max_length: {config.model.max_length} tokens, the model has {spec.max_positions} positions"
        )
    return found


def training_problems(spec: ModelSpec) -> list[str]:
    """What forbids training a model that can be converted, estimated and sampled from."""
    if not spec.num_experts:
        return []
    return [f"model.path: {spec.family} is a mixture of experts: converted and estimated, but not trained yet"]


def check(config: Config, gpu: Gpu | None) -> None:
    """Raises ConfigError with everything that `problems` finds."""
    if found := problems(config, gpu):
        raise ConfigError(found)


def check_state(config: Config, spec: ModelSpec, room: float) -> None:
    """Raises ConfigError where weights, gradients and optimizer of a trainer rank need more than its GPU's `room`."""
    m = memory(config, None, spec)
    if m.state > room:
        parts = {"weights": m.weights + m.codes, "gradients": m.gradients, "optimizer": m.optimizer}
        held = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        raise ConfigError(
            [f"memory: a trainer rank holds {m.state / GIB:.1f} GiB ({held}), its GPU has {room / GIB:.1f}: raise "
             "parallel.tp, pp or dp, or set precision.fp8_param=true"]
        )  # fmt: skip


def _tile_problems(config: Config, spec: ModelSpec, src: Layout, dst: Layout) -> Iterator[str]:
    if config.precision.mode == "bf16" or config.precision.keep_bf16:
        return
    for v in violations(spec, src, dst):
        if not v.fatal:
            yield f"{v.hf_name}: tiles break in {v.layout}: {v.reason} (precision.keep_bf16=true keeps it BF16)"


def _placement_problems(config: Config, spec: ModelSpec, src: Layout) -> Iterator[str]:
    p = config.parallel
    if src.world != p.world_size:
        yield f"parallel.ep: {src} needs {src.world} ranks, tp x pp x cp x dp is {p.world_size}"
    if spec.num_experts and config.precision.mode != "bf16":
        yield "precision.mode: mixture-of-experts models are not trained in FP8 yet, only bf16"
    if p.world_size % p.nodes:
        yield f"parallel.nodes: {p.world_size} ranks do not divide over {p.nodes} nodes"
    if on_cpu(config):
        return
    if p.world_size % p.nodes == 0:
        yield from _node_problems(config)
    if p.tp > GPUS_PER_NODE:
        yield f"parallel.tp: {p.tp} is more than the {GPUS_PER_NODE} GPUs of a node"


def _node_problems(config: Config) -> Iterator[str]:
    """What does not fit on a node."""
    p, r = config.parallel, config.rollout
    training, sampling = _on_one_node(config)
    replicas = f"rollout: {r.replicas} replicas of tp={r.tp} on {r.nodes or p.nodes} nodes need {sampling} GPUs of one"
    if training > GPUS_PER_NODE:
        yield f"parallel.nodes: {p.world_size} GPUs do not fit into {p.nodes} nodes of {GPUS_PER_NODE}"
    if r.nodes:
        if r.colocated:
            yield "rollout.nodes: engines on nodes of their own share no trainer's GPU, set rollout.colocated=false"
        if r.replicas < r.nodes:
            yield f"rollout.nodes: {r.replicas} replicas leave some of {r.nodes} nodes without work"
        if sampling > GPUS_PER_NODE:
            yield f"{replicas}, which has {GPUS_PER_NODE}"
    elif r.colocated and sampling > training:
        yield f"{replicas}, the trainer has {training} there"
    elif not r.colocated and training + sampling > GPUS_PER_NODE:
        yield f"{replicas} beside the trainer's {training}, and it has {GPUS_PER_NODE}"


def _memory_problems(config: Config, gpu: Gpu, m: Memory) -> Iterator[str]:
    room = gpu.memory / GIB
    for phase, need, hint in (
        ("training", m.training, "raise parallel.tp, pp or dp, lower train.micro_batch_size, or set model.recompute"),
        ("sampling", m.sampling, "lower rollout.gpu_memory_utilization, or raise parallel.tp, pp or dp"),
    ):
        if need > gpu.memory:
            yield f"memory: {phase} needs {need / GIB:.1f} GiB of the {room:.1f} GiB of one {gpu.name.upper()}: {hint}"
    if m.kv_tokens < config.model.max_length:
        yield (
            f"memory: the engine's share of {m.engine / GIB:.1f} GiB holds weights of {m.engine_weights / GIB:.1f} GiB "
            f"and a KV cache of {m.kv_tokens} tokens, one sequence needs {config.model.max_length}: "
            "raise rollout.gpu_memory_utilization or rollout.tp"
        )
