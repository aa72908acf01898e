"""The `sbatch` lines of README.md and docs/cluster.md, changed into what the test cluster has."""

from __future__ import annotations

import shlex

from docs_commands import REPO, commands

LINES = list(
    dict.fromkeys(
        line for page in ("README.md", "docs/cluster.md") for line in commands(REPO / page) if line.startswith("sbatch")
    )
)
SITE = {"P": "main", "A": "any"}


def sbatch(line: str, *options: str) -> list[str]:
    """The line's words with the cluster's partition, at most two nodes and no GPUs, and `options` of sbatch added."""
    words = iter(shlex.split(line))
    here = [next(words), "--parsable", *options]
    for word in words:
        if word == "--gpus-per-node":
            next(words)
        elif word == "--nodes":
            here.append(f"--nodes={min(2, int(next(words)))}")
        else:
            here.append(SITE.get(word, word))
    return here


def line_of(script: str, words: str = "") -> str:
    """The documented line that submits slurm/SCRIPT with `words` in it."""
    return next(line for line in LINES if f"slurm/{script}" in line and words in line)
