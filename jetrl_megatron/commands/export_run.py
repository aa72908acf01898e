"""Last step of a job that was asked to export (JETRL_EXPORT=1): the newest checkpoint as Hugging Face folders.

python -m jetrl_megatron.commands.export_run RUN_FOLDER

Writes RUN_FOLDER/export/step_N-hf (BF16) and, for recipes with FP8 rollout, RUN_FOLDER/export/step_N-fp8: the bytes
that the trainer's and the engine's GEMMs consumed. A folder that is there is complete and left alone, so a job that
was killed here goes on where it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from jetrl_megatron.config import Config, ConfigError


def export(run: Path) -> list[Path]:
    """Returns the folders, those that were there already included.

    Raises:
        ConfigError: `run` holds no run, or no complete checkpoint.
        OSError: the disk is full; what is complete stays.
    """
    from jetrl_conversion import convert
    from jetrl_megatron import checkpoint_names
    from jetrl_megatron.layouts import rollout_layout, trainer_layout

    if not (run / "config.json").is_file():
        raise ConfigError([f"{run} holds no run (config.json)"])
    newest = checkpoint_names.latest(run)
    if newest is None:
        raise ConfigError([f"{run} holds no complete checkpoint"])
    config = Config.from_dict(json.loads((run / "config.json").read_text()))
    folder = run / "export"
    folder.mkdir(exist_ok=True)
    plain, fp8 = folder / f"{newest.name}-hf", folder / f"{newest.name}-fp8"
    if not plain.exists():
        convert.megatron_to_hf(newest, plain)
    if config.precision.mode == "bf16":
        return [plain]
    if not fp8.exists():
        layouts = (trainer_layout(config), rollout_layout(config))
        convert.hf_to_fp8(plain, fp8, scales=config.precision.scales, layouts=layouts)
    return [plain, fp8]


def _command(run: Path) -> None:
    for made in export(run):
        print(f"exported {made}")


if __name__ == "__main__":
    from jetrl_megatron import cli

    command = typer.Typer(add_completion=False)
    command.command()(_command)
    sys.exit(cli.call(sys.argv[1:], command))
