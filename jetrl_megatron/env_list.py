"""The variables of a job, read from `slurm/env.sh`, the only place that lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
ENV_SH = REPO / "slurm" / "env.sh"
_LINE = re.compile(r"(default|pass) (\w+)(?: (\S+))?")


@cache
def entries() -> dict[str, str | None]:
    """Name -> default value, None for a variable that is only handed on. In the file's order.

    Raises:
        ValueError: a line of the list that the shell would read otherwise than this function.
    """
    found: dict[str, str | None] = {}
    for number, line in enumerate(ENV_SH.read_text().splitlines(), 1):
        if not line.startswith(("default ", "pass ")):
            continue
        match = _LINE.fullmatch(line)
        if not match or match[2] in found or (match[1] == "default") != (match[3] is not None):
            raise ValueError(f"{ENV_SH}:{number}: {line!r} is not `default NAME VALUE` or `pass NAME`, once each")
        found[match[2]] = match[3]
    return found


def effective(environ: Mapping[str, str], site: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a job gets: the user's shell over the site's file over the defaults. Without a value: absent."""
    values: dict[str, str] = {}
    for name, default in entries().items():
        value = environ.get(name, (site or {}).get(name, default))
        if value is not None:
            values[name] = value
    return values
