"""What differs between clusters: a small TOML file, `~/.config/jetrl/site.toml` or `--site FILE`.

`slurm/site.example.toml` is a complete one.
"""

from __future__ import annotations

import os
import re
import tomllib
import typing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jetrl_megatron.config import ConfigError, nearest
from jetrl_megatron.env_list import REPO, entries

EXAMPLE = REPO / "slurm" / "site.example.toml"


@dataclass(kw_only=True)
class SlurmSite:
    account: str = ""
    partition: str = ""
    time: str = "04:00:00"
    qos: str = ""
    gpus_per_node: int = 8
    gres: bool = False
    """Ask for `--gres=gpu:N` instead of `--gpus-per-node=N`."""
    exclusive: bool = True
    grace: int = 600
    options: dict = field(default_factory=dict)


@dataclass(kw_only=True)
class PathsSite:
    jobs: str = ""
    models: str = ""


@dataclass(kw_only=True)
class ContainerSite:
    image: str = ""
    mounts: list = field(default_factory=list)


@dataclass(kw_only=True)
class PythonSite:
    bin: str = ""


@dataclass(kw_only=True)
class Site:
    slurm: SlurmSite = field(default_factory=SlurmSite)
    paths: PathsSite = field(default_factory=PathsSite)
    container: ContainerSite = field(default_factory=ContainerSite)
    python: PythonSite = field(default_factory=PythonSite)
    env: dict = field(default_factory=dict)


def default_path() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "jetrl" / "site.toml"


def load(path: Path | None = None) -> Site:
    """Read and check a site file.

    Raises:
        ConfigError: no such file, not TOML, and every unknown key (with the nearest), wrong type or missing value.
    """
    path = path or default_path()
    if not path.is_file():
        raise ConfigError([f"no site file {path}: copy slurm/site.example.toml there and edit it, or give --site FILE"])
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: not TOML: {error}"]) from None
    problems: list[str] = []
    site = _build(Site, values, "", problems)
    problems += _problems(site)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return site


def _build(cls: type, values: dict[str, Any], prefix: str, problems: list[str]) -> Any:
    hints, out = typing.get_type_hints(cls), {}
    for key, value in values.items():
        kind = hints.get(key)
        if kind is None:
            problems.append(f"{prefix}{key}: unknown key, {nearest(key, [f.name for f in fields(cls)])}")
        elif hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
            out[key] = _build(kind, value, f"{prefix}{key}.", problems)
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            problems.append(f"{prefix}{key}: {value!r} is not a {getattr(kind, '__name__', kind)}")
        else:
            out[key] = value
    return cls(**out)


def _problems(site: Site) -> list[str]:
    s, found = site.slurm, []
    found += [f"slurm.{key}: missing" for key in ("account", "partition") if not getattr(s, key)]
    if not site.paths.jobs:
        found.append("paths.jobs: missing (a folder that all nodes see)")
    for key in ("jobs", "models"):
        value = getattr(site.paths, key)
        if value and not Path(value).is_absolute():
            found.append(f"paths.{key}: {value!r} is not an absolute path")
    if re.search(r"\s", site.paths.jobs):
        found.append(f"paths.jobs: {site.paths.jobs!r} has a space in it, which NeMo-Run does not quote")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", s.time):
        found.append(f"slurm.time: {s.time!r} is not a Slurm time such as 04:00:00 or 2-00:00:00")
    if s.gpus_per_node < 1:
        found.append(f"slurm.gpus_per_node: {s.gpus_per_node} must be at least 1")
    if s.grace < 60:
        found.append(f"slurm.grace: {s.grace} s are shorter than a step and a save; give at least 60")
    if site.container.mounts and not site.container.image:
        found.append("container.mounts: without container.image")
    if site.container.image and site.python.bin:
        found.append("python.bin: the container has its own Python; give container.image or python.bin")
    for mount in site.container.mounts:
        if not isinstance(mount, str) or not re.fullmatch(r"/[^:]*:/[^:]*(:[\w+]+)?", mount):
            found.append(f"container.mounts: {mount!r} is not /outside:/inside")
    if site.container.image:
        mounts = [str(mount).split(":") for mount in site.container.mounts]
        for key in ("jobs", "models"):
            value = getattr(site.paths, key)
            seen = [m for m in mounts if len(m) > 1 and Path(value).is_relative_to(m[1] or "-")]
            if value and not seen:
                found.append(f"paths.{key}: {value} is under none of container.mounts, the job would not see it")
            elif key == "jobs" and value and not any(outside == inside for outside, inside, *_ in seen):
                found.append(f"paths.jobs: {value} must have the same path outside: mount {seen[-1][1]}:{seen[-1][1]}")
    for name, value in site.env.items():
        if name not in entries():
            found.append(f"env.{name}: not on the list of slurm/env.sh, {nearest(name, entries())}")
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            found.append(f"env.{name}: {value!r} is not a text or number")
    return found
