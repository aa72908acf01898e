"""README.md, docs/cluster.md and docs/install-gpu.md, read by a user: every command of theirs runs.

The commands are taken from the pages, in their order, and run in a folder that looks like the repository. What a laptop
has not (8 GPUs, 16 GB of weights, a cluster) is replaced by the tiny model and small numbers; the command stays, and so
do its options. What needs more than that is run by the test that `ELSEWHERE` names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_commands import REPO, commands

from jetrl_conversion.known_models import known_config
from jetrl_megatron import site as sites
from jetrl_megatron.commands import estimate
from jetrl_megatron.env_list import entries
from jetrl_megatron.tiny import make_tiny_model

PAGES = [REPO / "README.md", REPO / "docs/cluster.md", REPO / "docs/install-gpu.md"]
COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands(page)))

SLURM = "tests/slurm/test_docs.py::test_sbatch_lines"
LAUNCHED = "tests/slurm/test_jobs.py::test_launched_job_survives_what_clusters_do_and_writes_the_same_metrics"
INSTALL = "tests/cpu/test_launch_install.py::test_gpu_group_resolves_and_nothing_is_installed"
NOT_HERE = "needs a container runtime and 25 GB"
ELSEWHERE = {
    r"\.bin/uv run pytest": ".ci/run",
    r"sbatch .*": SLURM,
    r"jetrl launch \S+ --follow": LAUNCHED,
    r"jetrl doctor": "tests/cpu/test_doctor.py::test_report_of_this_machine",
    r"slurm/install_gpu\.sh( --check)?": INSTALL,
    r"docker build .*|enroot import .*": NOT_HERE,
}
SMALL = (
    "train.steps=1 sft.steps=2 sft.batch_size=8 grpo.prompts_per_step=2 grpo.group_size=2 data.eval_size=2 "
    "rollout.max_response_tokens=8 train.timeout_s=1200 rollout.start_timeout_s=1200"
)
WORLD = " ".join(f"--set {word}" for word in SMALL.split())
INSTEAD = [
    (r"^\.bin/uv run ", ""),
    (r"^(jetrl (train|bench step) tiny\S+.*)", rf"\1 {WORLD}"),
    (r"step_000040", "step_000002"),
    (r"(--resume.*)", r"\1 --set train.steps=2"),
    (r"^(jetrl eval .*)", r"\1 --set data.eval_size=2"),
    (r"^(jetrl bench step .*)", r"\1 --steps 1 --warmup 1"),
    # Layout and memory of the model named, on nodes of 8 GPUs.
    (r"^jetrl train (qwen\S+) (.*model\.path.*)", r"jetrl launch \1 \2 --dry-run --site slurm/site.example.toml"),
    # Questions are read, asked and scored.
    (
        r"^jetrl train qwen\S+ (.*data\.name.*)",
        rf"jetrl train tiny_cpu_jetrl \1 {WORLD} --set model.path=tiny-model --output own",
    ),
    # The run is there already and finished, which is said after all checks.
    (r"^(jetrl launch tiny\S+ --executor local)", rf"\1 {WORLD} --output outputs/tiny_cpu_jetrl"),
    (r"(^|[ =])/(shared|models)/", r"\1\2/"),
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout without models and runs, a home without a site file, and what the pages take for granted."""
    desk = tmp_path_factory.mktemp("desk")
    for name in ("slurm", "docs", ".packages"):
        (desk / name).symlink_to(REPO / name)
    (desk / "models/Qwen3-8B").mkdir(parents=True)
    (desk / "models/Qwen3-8B/config.json").write_text(json.dumps(known_config("Qwen3-8B")))
    make_tiny_model(desk / "tiny-model", 0)
    shutil.copytree(desk / "tiny-model", desk / "Qwen3-8B")
    questions = [{"problem": f"How much is {n} + {n}?", "answer": str(2 * n)} for n in range(64)]
    (desk / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    return desk


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(desk: Path, command: str):
    for pattern, where in ELSEWHERE.items():
        if re.fullmatch(pattern, command):
            if where != NOT_HERE:
                file, _, test = where.partition("::")
                assert not test or f"def {test}(" in (REPO / file).read_text(), f"{command}: {where} is gone"
            return
    line = command
    for pattern, by in INSTEAD:
        line = re.sub(pattern, by, line)
    if line.startswith("jetrl plot"):
        for mode in ("bf16", "mixed"):
            shutil.copytree(desk / "outputs/tiny_cpu_jetrl", desk / f"outputs/tiny_cpu_{mode}")
    env = os.environ | {"HOME": str(desk / "home"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("XDG_CONFIG_HOME", None)
    # A plan is made for the model of that name, and on the desk a tiny one lies under it.
    folder = desk / "empty" if line.startswith("jetrl convert plan") else desk
    folder.mkdir(exist_ok=True)
    result = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=1400)
    assert result.returncode == 0, f"{line}\n{result.stdout[-3000:]}{result.stderr[-3000:]}"


@pytest.mark.parametrize("page", [*PAGES, *sorted((REPO / "slurm").glob("*.sbatch"))], ids=lambda f: f.name)
def test_recipes_and_files_named_exist(page: Path):
    from jetrl_recipes import registry

    text = page.read_text()
    for name in re.findall(r"\b(?:tiny|qwen|llama)\w+_(?:bf16|mixed|jetrl|exact)\b", text):
        assert name in registry.names()
    for file in re.findall(r"\b(?<!/)(?:slurm|docs|recipes|kernels|jetrl_megatron)/[\w/.]*\.\w+", text):
        assert (REPO / file).is_file(), file


def test_table_of_recipes_is_that_of_the_list():
    """Every recipe stands in the README, with its model, GPUs and memory."""
    shown: dict[str, list[str]] = {}
    for row in re.findall(r"^\| (`(?:tiny|qwen|llama)\w+.*)\|$", (REPO / "README.md").read_text(), re.M):
        names, *cells = [cell.strip() for cell in row.split("|")]
        shown |= dict.fromkeys(re.findall(r"`(\w+?)(?:_\*|_bf16)`", names), cells)
    rows = {row.name.rpartition("_")[0]: row for row in estimate.rows() if row.name.endswith(("_jetrl", "a3b_8k_bf16"))}
    assert rows.keys() <= shown.keys()
    for stem, row in rows.items():
        model, gpus, gib, _ = shown[stem]
        assert row.model in (model, "tiny") and gpus == row.gpus.partition(" ")[0].replace("CPU", "none"), stem
        assert gib == "few" or f"{gib} GiB" == row.memory, stem


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda f: f.name)
def test_messages_of_the_trouble_tables_are_ours(page: Path):
    """Three words in a row of each message stand in the sources."""
    table = page.read_text().partition("| message | what to do |")[2].partition("\n\n")[0]
    folders = ("jetrl_megatron", "conversion", "slurm", "kernels")
    files = [f for d in folders for f in (REPO / d).rglob("*") if f.suffix in (".py", ".sh", ".sbatch")]
    source = "".join(f.read_text() for f in files)
    messages = re.findall(r"^\| `(.+?)` \|", table, re.M)
    assert len(messages) > 5
    for message in messages:
        words = message.split()
        assert any(" ".join(words[i : i + 3]) in source for i in range(len(words) - 2)), message


def test_every_key_of_the_site_file_is_explained():
    explained = set(re.findall(r"`(\w+\.\w+)`", (REPO / "docs/cluster.md").read_text()))
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
