"""`jetrl eval`: pass@1 of a recipe's model, of a run, or of a Hugging Face folder, by the engine that training uses."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jetrl_megatron import checkpoint_names, prepare
from jetrl_megatron.config import Config, ConfigError, apply_overrides, nearest


def run(target: str, overrides: Sequence[str], recipe: str) -> dict[str, float]:
    """Evaluate and print one JSON object.

    Raises:
        ConfigError: `target` is none of the three, or a model folder without `--recipe`.
    """
    with tempfile.TemporaryDirectory(prefix="jetrl-eval-") as scratch:
        config, folder = _resolve(target, overrides, recipe, Path(scratch))
        prepare.check_layout(config, folder)
        from jetrl_megatron.refit.folder import loaded_engines
        from jetrl_megatron.sampling import Sampler

        with loaded_engines(folder, config, Path(scratch)) as pool:
            sampler = Sampler(config, folder, pool)
            result = sampler.evaluate()
    # A small data set has fewer than `data.eval_size`.
    result |= {"questions": len(sampler.prompts.evaluation()), "answers_per_question": config.data.eval_samples}
    print(json.dumps({"target": target, "mode": config.precision.mode, **result}))
    return result


def _resolve(target: str, overrides: Sequence[str], recipe: str, scratch: Path) -> tuple[Config, Path]:
    path = Path(target)
    if (path / "config.json").is_file():
        values = json.loads((path / "config.json").read_text())
        if "architectures" not in values:
            return _run_folder(path, values, overrides, scratch)
        if not recipe:
            raise ConfigError([f"{path} is a model folder: --recipe says which task and precision to evaluate it with"])
        return prepare.load_config(recipe, overrides), path.absolute()
    from jetrl_recipes import registry

    if (path / prepare.MEGATRON).is_file():
        how = "jetrl eval takes its run's folder (the newest one), or what `jetrl convert megatron-to-hf` makes of it"
        raise ConfigError([f"{path} is a checkpoint: {how}, with --recipe"])
    if target not in registry.names():
        where = nearest(target, registry.names(), registry.SHOWN)
        raise ConfigError([f"{target!r} is no recipe ({where}), no run's folder and no model folder"])
    config = prepare.load_config(target, overrides)
    return config, prepare.model_folder(config)


def _run_folder(path: Path, values: dict, overrides: Sequence[str], scratch: Path) -> tuple[Config, Path]:
    """Config of a run and the Hugging Face form of its newest checkpoint (its starting model if it has none)."""
    config = apply_overrides(Config.from_dict(values), overrides)
    config.validate()
    newest = checkpoint_names.latest(path)
    if newest is None:
        return config, Path(config.model.path)
    from jetrl_conversion.convert import megatron_to_hf

    folder = scratch / "model"
    megatron_to_hf(newest, folder, config=Path(config.model.path))
    return config, folder
