"""Recipes by name.

A recipe is a function without arguments that returns a `Config` and states only what differs from the defaults.
`@recipe()` registers it once for each precision mode: `tiny_cpu` becomes `tiny_cpu_bf16`, `tiny_cpu_mixed` and
`tiny_cpu_jetrl`, which by construction differ in `name` and `precision.mode` alone.

Every module of this folder is searched, so a new family is a new file. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import typing
from collections.abc import Callable, Iterable

from jetrl_megatron.config import Config, ConfigError, Mode, nearest

MODES: tuple[Mode, ...] = typing.get_args(Mode)

SHOWN = "jetrl train --list shows all"

_recipes: dict[str, Callable[[], Config]] = {}


def recipe(
    modes: Iterable[Mode] = MODES, exact: Callable[[Config], None] | None = None
) -> Callable[[Callable[[], Config]], Callable[[], Config]]:
    """Register the decorated function under `<its name>_<mode>` for each of `modes`.

    Args:
        exact: register `<its name>_exact` too: mode `jetrl` with `precision.parity=exact`, after this function has
            changed what exact parity asks to be changed.

    Raises:
        ValueError: two recipes carry the same name.
    """

    def register(build: Callable[[], Config]) -> Callable[[], Config]:
        for mode in modes:
            _add(f"{build.__name__}_{mode}", build, functools.partial(_in_mode, build, mode))
        if exact is not None:
            _add(f"{build.__name__}_exact", build, functools.partial(_exact, build, exact))
        return build

    return register


def _add(name: str, build: Callable[[], Config], made: Callable[[], Config]) -> None:
    def named() -> Config:
        config = made()
        config.name = name
        return config

    if name in _recipes:
        raise ValueError(f"recipe {name} is defined twice, the second time in {build.__module__}")
    _recipes[name] = named


def _in_mode(build: Callable[[], Config], mode: Mode) -> Config:
    config = build()
    config.precision.mode = mode
    return config


def _exact(build: Callable[[], Config], adapt: Callable[[Config], None]) -> Config:
    config = _in_mode(build, "jetrl")
    config.precision.parity = "exact"
    adapt(config)
    return config


def as_it_is(config: Config) -> None:
    """For `recipe(exact=...)`: the recipe's layout is one that exact parity supports."""


@functools.cache
def _load_families() -> None:
    package = importlib.import_module("jetrl_recipes")
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        if f"jetrl_recipes.{module}" != __name__:
            importlib.import_module(f"jetrl_recipes.{module}")


def names() -> list[str]:
    """Every recipe's name, families together, in order of definition."""
    _load_families()
    return list(_recipes)


def get(name: str) -> Config:
    """A fresh config of the recipe called `name`.

    Raises:
        ConfigError: no recipe has that name; the nearest one is given.
    """
    _load_families()
    if name not in _recipes:
        raise ConfigError([f"recipe {name!r} does not exist, {nearest(name, _recipes, SHOWN)}"])
    return _recipes[name]()


def all() -> dict[str, Config]:
    """A fresh config of every recipe, by name."""
    return {name: get(name) for name in names()}
