"""`jetrl bench refit`: on this GPU, on this CPU beside the usual ways, or for a cluster that is not at hand."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetrl_megatron.commands.bench_gpu import child, need_gpu

if TYPE_CHECKING:
    from jetrl_conversion.layout import Layout
    from jetrl_conversion.model_spec import ModelSpec

GB = 1e9
SIZES = ("tp", "pp", "ep", "etp", "dp")
"""Of a trainer layout."""
TRAINER = "tp=2"
"""Trainer layout where none is given."""


def refit(
    model: Annotated[str, typer.Argument(help="Hugging Face folder (config.json is enough), or a released model.")],
    cpu: Annotated[bool, typer.Option("--cpu", help="Between processes of this machine, by gloo.")] = False,
    nccl: Annotated[bool, typer.Option("--nccl", help="Between GPUs of this machine, one for each rank.")] = False,
    stock: Annotated[bool, typer.Option("--stock", help="On one GPU: the usual way into stock vLLM, too.")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="From the plan alone, at bandwidths given.")] = False,
    trainer: Annotated[str, typer.Option(help=f"Trainer layout: any of {', '.join(SIZES)}.")] = TRAINER,
    replicas: Annotated[int, typer.Option(help="Rollout replicas.")] = 1,
    rollout_tp: Annotated[int, typer.Option(help="Tensor parallel ranks of one replica.")] = 1,
    rollout_ep: Annotated[
        int, typer.Option(help="Ranks that share out a replica's experts, which then stay whole: a multiple of its tp.")
    ] = 1,
    layers: Annotated[int, typer.Option(help="Cut the model to so many layers; 0 keeps all.")] = 0,
    rounds: Annotated[int, typer.Option(help="Refits to time after the first.")] = 5,
    staging_mib: Annotated[int, typer.Option(help="refit.staging_mib")] = 256,
    colocated: Annotated[bool, typer.Option(help="--simulate: engines on the trainers' GPUs.")] = False,
    gpus_per_node: Annotated[int, typer.Option(help="--simulate: GPUs of a node.")] = 8,
    nvlink: Annotated[float, typer.Option(help="--simulate: GB/s of one GPU within its node.")] = 450.0,
    network: Annotated[float, typer.Option(help="--simulate: GB/s of one GPU to other nodes.")] = 50.0,
) -> None:
    """Time and bytes of a refit: to an engine on the trainer's GPU, digests included, or as options below say.

    Examples:

        jetrl bench refit models/Qwen3-8B --stock

        jetrl bench refit Qwen3-0.6B --cpu --layers 4 --trainer tp=2,pp=2 --replicas 2

        jetrl bench refit Qwen3-8B --nccl --trainer tp=2 --rollout-tp 2

        jetrl bench refit Qwen3-235B-A22B --simulate --trainer tp=4,pp=2,ep=8,dp=4 --replicas 32 --rollout-tp 4
    """
    from jetrl_megatron.config import ConfigError

    given = [name for name, chosen in {"--cpu": cpu, "--nccl": nccl, "--simulate": simulate}.items() if chosen]
    wrong = [f"{' and '.join(given)}: choose one"] if len(given) > 1 else []
    numbers = {"replicas": replicas, "rollout-tp": rollout_tp, "rollout-ep": rollout_ep, "rounds": rounds}
    numbers |= {"staging-mib": staging_mib, "gpus-per-node": gpus_per_node, "nvlink": nvlink, "network": network}
    wrong += [f"--{name} {value}: more than 0" for name, value in numbers.items() if value <= 0]
    if not given and not (Path(model) / "config.json").is_file():
        wrong.append(f"{model}: a folder with config.json; names of released models go with --cpu, --nccl, --simulate")
    if not given:
        layout = {"--layers": layers, "--replicas": replicas - 1, "--rollout-tp": rollout_tp - 1}
        layout |= {"--rollout-ep": rollout_ep - 1, "--trainer": trainer != TRAINER}
        wrong += [f"{name}: goes with --cpu, --nccl or --simulate" for name, changed in layout.items() if changed]
    if stock and given:
        wrong.append(f"--stock goes with a refit on one GPU, not with {given[0]}")
    if wrong:
        raise ConfigError(wrong)
    if nccl or not given:
        need_gpu()
    if not given:
        settings = {"model": str(Path(model).absolute()), "rounds": rounds, "stock": stock}
        result = child("jetrl_megatron.commands.bench_refit_gpu", "ours", settings)
        for name, value in result.items():
            print(f"{name:28} {value}")
        if stock:
            print(f"gather, send BF16, quantize in a stock engine: {result['usual_over_ours']:.1f} times as long")
        print(json.dumps(result))
        return
    config = _config(model, layers)
    spec, source, replica = _layouts(config, trainer, rollout_tp, rollout_ep)
    if simulate:
        _simulate(spec, source, replica, replicas, colocated, gpus_per_node, nvlink * GB, network * GB)
    else:
        from jetrl_megatron.commands.bench_refit_ranks import compare

        compare(config, source, replica, replicas, rounds, staging_mib, "cuda" if nccl else "cpu")


def _config(model: str, layers: int) -> dict:
    """The model's config.json, cut to `layers` if they are not 0."""
    from jetrl_conversion.errors import ConversionError
    from jetrl_conversion.known_models import known_config
    from jetrl_megatron.config import ConfigError

    folder = Path(model)
    try:
        if (folder / "config.json").is_file():
            config = json.loads((folder / "config.json").read_text())
        else:
            config = known_config(folder.name)
    except ConversionError as error:
        raise ConfigError(str(error).splitlines()) from None
    except ValueError as error:
        raise ConfigError([f"{folder / 'config.json'}: {error}"]) from None
    most = config.get("num_hidden_layers")
    if isinstance(most, int) and not 0 <= layers <= most:
        raise ConfigError([f"--layers {layers}: 1 to {most} of {folder.name}, or 0 for all"])
    return {**config, "num_hidden_layers": layers} if layers else config


def _layouts(config: dict, trainer: str, rollout_tp: int, rollout_ep: int) -> tuple[ModelSpec, Layout, Layout]:
    """The model and both layouts. Raises ConfigError with everything that is wrong, and a size that would do."""
    from jetrl_conversion.errors import LayoutError
    from jetrl_conversion.layout import Layout, problems
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_conversion.plan_report import parse_layout
    from jetrl_megatron.config import ConfigError

    spec, wrong, layouts = load_model_spec(config), [], {}
    wanted = {
        "--trainer": lambda: parse_layout("megatron", trainer),
        "--rollout-tp" + ", --rollout-ep" * (rollout_ep > 1): lambda: Layout("vllm", tp=rollout_tp, ep=rollout_ep),
    }
    for option, make in wanted.items():
        try:
            layouts[option] = make()
        except LayoutError as error:
            wrong += [f"{option}: {problem}" for problem in error.problems]
    for option, layout in layouts.items():
        if reasons := dict.fromkeys(reason for _, reason in problems(spec, layout)):
            near = next((f" ({other} would do)" for other in _smaller(layout) if not problems(spec, other)), "")
            wrong.append(f"{option}: {'; '.join(reasons)}{near}")
    if wrong:
        raise ConfigError(wrong)
    return spec, *layouts.values()


def _smaller(layout: Layout) -> Iterator[Layout]:
    """Layouts with one size less, the nearest first."""
    from jetrl_conversion.errors import LayoutError

    for key in SIZES:
        for size in range((getattr(layout, key) or 1) - 1, 0, -1):
            with contextlib.suppress(LayoutError):
                yield replace(layout, **{key: size})


def _simulate(spec, source, replica, replicas: int, colocated: bool, gpus: int, nvlink: float, network: float) -> None:
    from jetrl_conversion.planner import quantized_tensors
    from jetrl_megatron.config import ConfigError
    from jetrl_megatron.refit.simulate import simulate

    try:
        s = simulate(
            spec, source, replica, replicas, colocated=colocated, gpus_per_node=gpus, nvlink=nvlink, network=network
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    where = "the trainers' nodes" if colocated else "nodes of their own"
    kept = sum(info.quantized for info in spec.tensors().values()) - len(quantized_tensors(spec, source, replica))
    print(f"{source.world} trainer GPUs {source}, {replicas} replicas {replica} on {where}, {gpus} GPUs a node")
    if kept:
        print(f"{kept} tensors travel as BF16: a layout cuts their tiles (jetrl convert plan names them)")
    print(f"bytes to place {s.bound / GB:.3f} GB, of which {s.network / GB:.3f} GB change the node")
    for link in s.links:
        print(
            f"{link.kind:12} GPU {link.gpu:4} of node {link.gpu // gpus:3}  {link.nbytes / GB:9.3f} GB  "
            f"{link.seconds * 1e3:9.2f} ms"
        )
    print(f"fullest link: {s.links[0].kind}, {s.seconds:.4f} s" if s.links else "nothing moves")
    for name, value in (("BF16", s.gather), ("FP8", s.gather_fp8)):
        ratio = f", {value / s.seconds:.1f} times as long" if s.seconds else ""
        print(f"gather whole {name} tensors on one GPU and broadcast them: at least {value:.4f} s{ratio}")
