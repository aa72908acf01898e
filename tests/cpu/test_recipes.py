"""Every recipe loads, is valid, and differs from its siblings by the precision mode alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jetrl_megatron.config import Config, ConfigError
from jetrl_recipes import registry

NAMES = registry.names()


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_valid_and_says_what_it_is_for(name: str):
    config = registry.get(name)
    config.validate()
    assert config.name == name
    assert config.purpose
    suffix = "exact" if config.precision.parity == "exact" else config.precision.mode
    assert name.endswith(f"_{suffix}")
    assert Config.from_dict(config.to_dict()) == config


def test_modes_of_one_recipe_differ_by_precision_mode_alone():
    families: dict[str, list[dict]] = {}
    for name, config in registry.all().items():
        if config.precision.parity == "exact":
            continue
        values = config.to_dict()
        mode = values["precision"].pop("mode")
        stem = values.pop("name").removesuffix(f"_{mode}")
        assert name == f"{stem}_{mode}"
        families.setdefault(stem, []).append(values)
    for stem, members in families.items():
        assert all(values == members[0] for values in members), stem


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'tiny_cpu_jetrl'"):
        registry.get("tiny_cpu_jetlr")


def test_configs_are_fresh_each_time():
    first = registry.get("tiny_cpu_jetrl")
    first.grpo.group_size += 1
    assert registry.get("tiny_cpu_jetrl").grpo.group_size == first.grpo.group_size - 1


def test_registry_needs_no_torch():
    code = "import sys; from jetrl_recipes import registry; registry.all(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
