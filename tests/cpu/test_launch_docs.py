"""What docs/cluster.md and the batch scripts tell a user to type exists: recipes, scripts, options, variables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from jetrl_megatron import site as sites
from jetrl_megatron.commands import estimate
from jetrl_megatron.env_list import entries
from jetrl_recipes import registry

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "docs/cluster.md", REPO / "docs/install-gpu.md", *sorted((REPO / "slurm").glob("*.sbatch"))]


def commands(page: Path) -> list[list[str]]:
    """Command lines of a page: indented by four in Markdown, behind `#   ` in a script; and `inline` ones."""
    text = page.read_text()
    block = re.findall(r"^(?:    |#   )((?:jetrl|sbatch|slurm/)\s?.*)$", text, re.M)
    inline = re.findall(r"`((?:jetrl|sbatch) [^`]+)`", text)
    lines = [line.split("  #")[0].split(">")[0].strip() for line in block + inline]
    return [shlex.split(line) for line in lines if "KIND SRC" not in line and "RECIPE" not in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda f: f.name)
def test_commands_name_what_exists(page: Path):
    found = commands(page)
    assert found
    for words in found:
        for word in words:
            if re.fullmatch(r"(tiny|qwen|llama)\w+_(bf16|mixed|jetrl)", word):
                assert word in registry.names(), words
            if word.startswith("slurm/"):
                assert (REPO / word).is_file(), words


def test_commands_of_launch_and_estimate_parse():
    """Every option shown is one that the command line has."""
    import typer

    from jetrl_megatron.cli import app

    group = typer.main.get_command(app)
    for page in PAGES:
        for words in commands(page):
            if words[0] != "jetrl" or words[1] not in ("launch", "estimate", "train"):
                continue
            known = {option for p in group.commands[words[1]].params for option in p.opts}  # type: ignore[attr-defined]
            assert {word for word in words if word.startswith("--")} <= known, words


def test_every_key_of_the_site_file_is_explained():
    text = (REPO / "docs/cluster.md").read_text()
    explained = set(re.findall(r"`(\w+\.\w+)`", text))
    kinds = {
        "slurm": sites.SlurmSite,
        "paths": sites.PathsSite,
        "container": sites.ContainerSite,
        "python": sites.PythonSite,
    }
    for section, kind in kinds.items():
        for key in kind.__dataclass_fields__:
            assert f"{section}.{key}" in explained


def test_variables_named_in_the_docs_are_on_the_list_or_read_by_the_scripts():
    text = (REPO / "docs/cluster.md").read_text()
    scripts = "".join(f.read_text() for f in (REPO / "slurm").iterdir())
    for name in set(re.findall(r"`((?:JETRL|NCCL|GLOO|HF)_[A-Z_]+)", text)):
        assert name in entries() or name in scripts, name


def test_example_site_file_is_valid():
    assert sites.load(sites.EXAMPLE).slurm.account == "my_account"


def test_list_and_estimate_of_the_docs(capsys: pytest.CaptureFixture[str]):
    estimate.run("qwen3_32b_16k_jetrl", nodes=8)
    assert "64 x H100 on 8 node(s)" in capsys.readouterr().out
