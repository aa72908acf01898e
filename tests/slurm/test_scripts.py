"""The scripts themselves: linted, and with one list of variables and one exit code between shell and Python."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jetrl_megatron.signals import REQUEUE_EXIT_CODE

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    f for d in ("slurm", "tests/slurm") for pattern in ("*.sh", "*.sbatch") for f in (REPO / d).glob(pattern)
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.name)
def test_shellcheck(script: Path):
    if not shutil.which("shellcheck"):
        pytest.skip("run tests/slurm/install.sh: shellcheck missing")
    result = subprocess.run(["shellcheck", "-x", str(script)], capture_output=True, text=True, cwd=REPO)
    assert result.returncode == 0, result.stdout


def test_no_personal_paths_and_no_kill_by_name():
    for script in SCRIPTS:
        text = script.read_text()
        assert not re.search(r"/home/\w|/lustre/|pkill|killall", text), script.name


def test_requeue_code_is_the_same_in_shell_and_python():
    assert f'[ "$code" = {REQUEUE_EXIT_CODE} ]' in (REPO / "slurm/task.sh").read_text()


def test_variables_are_set_in_env_sh_alone():
    names = re.findall(r"^(?:default|pass) (\w+)", (REPO / "slurm/env.sh").read_text(), re.M)
    assert len(names) == len(set(names)) > 50
    for script in SCRIPTS:
        if script.name != "env.sh":
            exported = re.findall(r"export (\w+)=", script.read_text())
            assert not set(exported) & set(names), f"{script.name} sets what env.sh lists"
