"""`jetrl convert`: checkpoints between Hugging Face, block FP8 and Megatron, and the plan between two layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Convert checkpoints, or show how bytes move between two parallel layouts.\n\n"
    "Example: jetrl convert hf-to-fp8 Qwen3-8B Qwen3-8B-FP8",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Src = Annotated[Path, typer.Argument(help="Folder to read.", show_default=False)]
Dst = Annotated[Path, typer.Argument(help="Folder to write; must not exist. It appears when complete.")]
Config = Annotated[
    Path | None, typer.Option(help="Hugging Face folder or config.json of the model, if SRC has none of its own.")
]
Scales = Annotated[str, typer.Option(help="pow2: powers of two, exact in BF16. fp32: amax/448.")]
Keep = Annotated[
    list[str], typer.Option("--keep-bf16", metavar="PATTERN", help="Names (with *) that stay BF16; may be repeated.")
]
Train = Annotated[str, typer.Option(metavar="tp=4,pp=2", help="Also keep BF16 what this Megatron layout cannot hold.")]
Rollout = Annotated[str, typer.Option(metavar="tp=2", help="Also keep BF16 what this vLLM layout cannot hold.")]


@app.command("hf-to-megatron", short_help="Hugging Face -> Megatron, for any TP, PP and EP.")
def hf_to_megatron(src: Src, dst: Dst) -> None:
    """Hugging Face folder -> Megatron distributed checkpoint that loads at any TP, PP and EP.

    Example: jetrl convert hf-to-megatron Qwen3-8B Qwen3-8B-megatron
    """
    from jetrl_conversion import convert

    convert.hf_to_megatron(src, dst)
    _done(dst)


@app.command("megatron-to-hf", short_help="Megatron, saved at any TP, PP and EP -> Hugging Face.")
def megatron_to_hf(src: Src, dst: Dst, config: Config = None) -> None:
    """Megatron distributed checkpoint, saved at any TP, PP and EP -> Hugging Face folder.

    Example: jetrl convert megatron-to-hf outputs/run/checkpoints/step_000100 Qwen3-8B-new --config Qwen3-8B
    """
    from jetrl_conversion import convert

    convert.megatron_to_hf(src, dst, config=config)
    _done(dst)


@app.command("hf-to-fp8", short_help="Hugging Face -> block FP8, for stock vLLM.")
def hf_to_fp8(src: Src, dst: Dst, scales: Scales = "pow2", keep_bf16: Keep = [], train: Train = "",  # noqa: B006
              rollout: Rollout = "") -> None:  # fmt: skip
    """Hugging Face folder -> block-FP8 folder that stock vLLM and transformers load.

    Example: jetrl convert hf-to-fp8 Qwen3-8B Qwen3-8B-FP8 --keep-bf16 'model.layers.0.*'
    """
    from jetrl_conversion import convert

    convert.hf_to_fp8(src, dst, scales=scales, keep_bf16=keep_bf16, layouts=_layouts(train, rollout))
    _done(dst)


@app.command("fp8-to-hf", short_help="Block FP8 -> BF16, dequantized.")
def fp8_to_hf(src: Src, dst: Dst) -> None:
    """Block-FP8 folder -> BF16 folder of the dequantized values.

    Example: jetrl convert fp8-to-hf Qwen3-8B-FP8 Qwen3-8B-dequantized
    """
    from jetrl_conversion import convert

    convert.fp8_to_hf(src, dst)
    _done(dst)


@app.command("megatron-to-fp8", short_help="Megatron -> block FP8.")
def megatron_to_fp8(src: Src, dst: Dst, scales: Scales = "pow2", keep_bf16: Keep = [], train: Train = "",  # noqa: B006
                    rollout: Rollout = "", config: Config = None) -> None:  # fmt: skip
    """Megatron distributed checkpoint -> block-FP8 folder, the same bytes as by way of a BF16 folder.

    Example: jetrl convert megatron-to-fp8 Qwen3-8B-megatron Qwen3-8B-FP8
    """
    from jetrl_conversion import convert

    layouts = _layouts(train, rollout)
    convert.megatron_to_fp8(src, dst, scales=scales, keep_bf16=keep_bf16, layouts=layouts, config=config)
    _done(dst)


@app.command(short_help="Who holds which rows in two layouts, and what cannot move.")
def plan(
    model: Annotated[str, typer.Argument(help="Model folder, config.json, or a known name such as Qwen3-8B.")],
    train: Annotated[str, typer.Option(metavar="tp=4,pp=2,ep=1", help="Megatron: tp, pp, ep, etp, dp.")],
    rollout: Annotated[str, typer.Option(metavar="tp=2,ep=1", help="vLLM: tp, ep, dp (replicas).")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, with every row and rank.")] = False,
) -> None:
    """Who holds which rows of every tensor, bytes moved per rank, and what cannot move. Needs no weights and no GPU.

    Example: jetrl convert plan Qwen3-8B --train tp=4,pp=2 --rollout tp=2
    """
    import json

    from jetrl_conversion.errors import LayoutError
    from jetrl_conversion.known_models import known_config
    from jetrl_conversion.model_spec import load_model_spec
    from jetrl_conversion.plan_report import describe, parse_layout, table
    from jetrl_conversion.planner import plan_reshard

    spec = load_model_spec(Path(model) if Path(model).exists() else known_config(model))
    src, dst = parse_layout("megatron", train), parse_layout("vllm", rollout)
    try:
        made, error = plan_reshard(spec, src, dst), None
    except LayoutError as caught:
        made, error = None, caught
    found = describe(spec, src, dst, made)
    typer.echo(json.dumps(found) if json_ else table(found))
    if error is not None:
        raise error


def _layouts(train: str, rollout: str) -> list:
    from jetrl_conversion.plan_report import parse_layout

    found = [parse_layout("megatron", train)] if train else []
    return found + ([parse_layout("vllm", rollout)] if rollout else [])


def _done(dst: Path) -> None:
    from jetrl_conversion.disk import size_text

    typer.echo(f"{dst}: {size_text(sum(file.stat().st_size for file in dst.rglob('*') if file.is_file()))}")
