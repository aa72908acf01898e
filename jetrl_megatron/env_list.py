"""The variables of a job, read from `slurm/env.sh`, the only place that lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
ENV_SH = REPO / "slurm" / "env.sh"
_LINE = re.compile(r"(default|pass) (\w+)(?: (\S+))?")


@cache
def entries() -> dict[str, str | None]:
    """Name -> default value, None for a variable that is only handed on. In the file's order."""
    return {name: default for _, name, default in _lines()}


@cache
def numerics() -> tuple[str, ...]:
    """Names under the headings `numbers`: trainer and engine, and all nodes, must agree on their values."""
    return tuple(name for heading, name, _ in _lines() if heading.startswith("numbers"))


def _lines() -> Iterator[tuple[str, str, str | None]]:
    """(heading, name, default) of each variable.

    Raises:
        ValueError: a line of the list that the shell would read otherwise than this function.
    """
    heading, seen = "", set()
    for number, line in enumerate(ENV_SH.read_text().splitlines(), 1):
        if line.startswith("# --- "):
            heading = line.strip("# -")
        if not line.startswith(("default ", "pass ")):
            continue
        match = _LINE.fullmatch(line)
        if not match or match[2] in seen or (match[1] == "default") != (match[3] is not None):
            raise ValueError(f"{ENV_SH}:{number}: {line!r} is not `default NAME VALUE` or `pass NAME`, once each")
        seen.add(match[2])
        yield heading, match[2], match[3]


def differences(environments: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Variables of `numerics` on which processes disagree, one line each.

    Args:
        environments: who (`rank 0 on n1`, `engine 0`, ...) -> its environment.
    """
    found = []
    for name in numerics():
        holders: dict[str | None, list[str]] = {}
        for who, environ in environments.items():
            holders.setdefault(environ.get(name), []).append(who)
        if len(holders) > 1:
            said = "; ".join(
                f"{', '.join(who)}: {'not set' if value is None else repr(value)}" for value, who in holders.items()
            )
            found.append(f"{name} differs: {said}")
    return found


def effective(environ: Mapping[str, str], site: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a job gets: the user's shell over the site's file over the defaults. Without a value: absent."""
    values: dict[str, str] = {}
    for name, default in entries().items():
        value = environ.get(name, (site or {}).get(name, default))
        if value is not None:
            values[name] = value
    return values
