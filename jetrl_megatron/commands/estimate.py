"""`jetrl estimate`, and the rows of `jetrl train --list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jetrl_megatron.config import Config, ConfigError, apply_overrides
from jetrl_megatron.hardware import GIB, GPUS_PER_NODE, Gpu, gpu
from jetrl_megatron.memory import Memory, gpus, memory, on_cpu, problems, spec_of
from jetrl_megatron.step_time import StepTime, step_time

DEFAULT_GPU = "h100"


class Row(NamedTuple):
    """One line of `jetrl train --list`."""

    name: str
    model: str
    gpus: str
    memory: str
    """Peak of the fullest GPU, or of one process on a CPU."""
    purpose: str


def rows() -> list[Row]:
    """Every recipe, checked against one H100's memory."""
    from jetrl_recipes import registry

    found = []
    # From the laptop to four nodes, as in the README.
    for name, config in sorted(registry.all().items(), key=lambda item: gpus(item[1])):
        peak = memory(config, gpu(DEFAULT_GPU)).peak / GIB
        where = f"{gpus(config)} x {DEFAULT_GPU.upper()}" if gpus(config) else "CPU"
        model = config.model.path.rsplit("/", 1)[-1]
        found.append(Row(name, model, where, f"{peak:.1f} GiB", config.purpose))
    return found


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns padded with blanks; the last one is left as it is."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in (header, *lines))


def list_text() -> str:
    return table(("recipe", "model", "GPUs", "memory/GPU", "purpose"), rows())


def on_nodes(config: Config, nodes: int) -> Config:
    """The same recipe on another number of whole nodes: data parallel ranks fill them, and so do engines.

    Raises:
        ConfigError: the trainer's ranks, or the engines', do not fill the nodes.
    """
    if nodes == config.nodes:
        return config
    p, total = config.parallel, nodes * GPUS_PER_NODE
    inner = p.tp * p.pp * p.cp
    if on_cpu(config):
        raise ConfigError(["--nodes: this recipe runs on a CPU; nodes of GPUs are what is estimated"])
    if config.rollout.nodes:
        raise ConfigError(["--nodes: engines have nodes of their own; set parallel.nodes, parallel.dp, rollout.nodes"])
    wrong = [f"--nodes: {total} GPUs do not divide by tp x pp x cp = {inner}"] if total % inner else []
    if GPUS_PER_NODE % config.rollout.tp:
        wrong.append(f"--nodes: {GPUS_PER_NODE} GPUs of a node do not divide by rollout.tp = {config.rollout.tp}")
    if wrong:
        raise ConfigError(wrong)
    replicas = total // config.rollout.tp
    sizes = {"parallel.nodes": nodes, "parallel.dp": total // inner, "rollout.replicas": replicas}
    return apply_overrides(config, [f"{key}={value}" for key, value in sizes.items()])


def report(config: Config, device: Gpu) -> str:
    """Memory and time of a recipe, for people. Does not refuse: `problems` are the caller's."""
    m = memory(config, device)
    spec = spec_of(config)
    p, r = config.parallel, config.rollout
    count = gpus(config)
    place = f"{count} x {device.name.upper()} on {config.nodes} node(s)" if count else "CPU"
    head = [
        f"{config.name}: {config.model.path.rsplit('/', 1)[-1]}, {config.precision.mode}, {place}",
        f"  trainer tp={p.tp} pp={p.pp} cp={p.cp} dp={p.dp}, engines {r.replicas} x tp={r.tp}, "
        f"{spec.num_layers} layers, {config.model.max_length} tokens a sequence",
        "",
        _memory_table(m, device if count else None),
    ]
    if count:
        head += ["", _time_table(config, step_time(config, device))]
    return "\n".join(head)


def _memory_table(m: Memory, device: Gpu | None) -> str:
    def g(value: float) -> str:
        return f"{value / GIB:8.1f}"

    state = [("weights BF16", m.weights), ("FP8 codes and scales", m.codes), ("gradients FP32", m.gradients)]
    state += [("master and moments FP32", m.optimizer)]
    lines = [(f"  {name}", g(value)) for name, value in state]
    lines += [("  activations", g(m.activations)), ("  logits", g(m.logits)), ("  overhead", g(m.overhead))]
    lines += [("training, peak", g(m.training)), ("  engine's share", g(m.engine))]
    lines += [("    of which weights", g(m.engine_weights)), ("sampling, peak", g(m.sampling))]
    limit = [("one GPU has", g(device.memory))] if device else []
    kv = f"KV cache of one replica: {m.kv_tokens} tokens" if device else ""
    return table(("memory of the fullest GPU, estimated", "     GiB"), lines + limit) + (f"\n{kv}" if kv else "")


def _time_table(config: Config, t: StepTime) -> str:
    g = config.grpo
    lines = [
        ("rollout", f"{t.rollout:9.1f}"),
        ("training", f"{t.training:9.1f}"),
        ("optimizer", f"{t.optimizer:9.2f}"),
        ("refit", f"{t.refit:9.2f}"),
        ("step", f"{t.total:9.1f}"),
    ]
    longest = config.rollout.max_response_tokens
    note = (
        f"{g.prompts_per_step} x {g.group_size} answers, all of {longest} tokens (upper bound), "
        f"{t.concurrent} at a time on a replica.\n"
        "A first-order estimate from peak and bandwidth figures, not a measurement."
    )
    return table(("time of one step, estimated", "  seconds"), lines) + f"\n{note}"


def run(recipe: str, overrides: Sequence[str] = (), nodes: int | None = None, device: str = DEFAULT_GPU) -> None:
    """Print the estimate.

    Raises:
        ConfigError: unknown recipe or GPU, and everything that forbids the recipe (after printing the numbers).
    """
    from jetrl_recipes import registry

    config = apply_overrides(registry.get(recipe), overrides)
    config.validate()
    own = config
    if nodes is not None:
        config = on_nodes(config, nodes)
    chosen = gpu(device)
    found = problems(config, chosen)
    if not any("cannot be built" in line or "parallel.ep" in line for line in found):
        print(report(config, chosen))
        if config is not own:
            p = config.parallel
            sizes = f"parallel.nodes={p.nodes} parallel.dp={p.dp} rollout.replicas={config.rollout.replicas}"
            print("These sizes: " + " ".join(f"--set {size}" for size in sizes.split()))
    if found:
        raise ConfigError(found)
