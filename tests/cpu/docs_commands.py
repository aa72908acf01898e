"""The command lines of a documentation page, as a reader would copy them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def commands(page: Path) -> list[str]:
    """Lines of the page's code blocks, then the `jetrl ...` and `sbatch ...` in its sentences; comments cut off.

    A listing of folders (`kernels/ formats ...`) and a sentence that leaves something out (`RECIPE`, `...`) are none.
    """
    text = page.read_text()
    found = [line for block in _blocks(text) if not block[0].split()[0].endswith("/") for line in block]
    prose = re.sub(r"^(    .*|\|.*)$", "", text, flags=re.M)
    inline = [" ".join(line.split()) for line in re.findall(r"`((?:jetrl|sbatch) [^\s`]+\s[^`]+)`", prose)]
    found += [line for line in inline if not re.search(r"\b[A-Z]{3,}\b|\.\.\.", line)]
    return [re.split(r"\s#\s", line)[0].strip() for line in found]


def _blocks(text: str) -> Iterator[list[str]]:
    for match in re.finditer(r"(?:(?<=\n\n)|\A)(?:    \S.*\n)+", text):
        yield [line.strip() for line in match[0].splitlines()]
