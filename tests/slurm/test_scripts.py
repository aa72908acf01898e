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


def test_container_gets_folders_and_variables(tmp_path: Path):
    """The `srun` line for pyxis, which is not on this machine: a stand-in prints its arguments."""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "JETRL_ROOT": str(REPO),
        "JETRL_RUN_DIR": str(tmp_path / "run"),
        "JETRL_CONTAINER_IMAGE": "/images/a.sqsh",
        "JETRL_CONTAINER_MOUNTS": "/models:/models",
        "NCCL_IB_HCA": "mlx5",
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": "2",
    }
    script = '. "$JETRL_ROOT/slurm/job.sh"; jetrl_srun --nodes=1 jetrl train x --set "a=b c"'
    result = subprocess.run(["bash", "-euc", script], env=env, capture_output=True, text=True, check=True)
    words = result.stdout.splitlines()
    assert words[-7:] == ["bash", f"{REPO}/slurm/task.sh", "jetrl", "train", "x", "--set", "a=b c"]
    assert {"--nodes=1", "--label", "--kill-on-bad-exit=1", "--container-image=/images/a.sqsh"} <= set(words)
    assert f"--container-mounts={REPO}:{REPO},{tmp_path}/run:{tmp_path}/run,/models:/models" in words
    handed = next(w for w in words if w.startswith("--container-env=")).removeprefix("--container-env=").split(",")
    assert {"NCCL_IB_HCA", "NCCL_DEBUG", "JETRL_RUN_DIR", "VLLM_USE_DEEP_GEMM_E8M0"} <= set(handed)
    assert "NCCL_ALGO" not in handed, "not set anywhere"
