"""`jetrl launch`: rendered scripts against golden files, site files, and everything refused before submission.

After a wanted change: `JETRL_UPDATE_GOLDEN=1 pytest tests/cpu/test_launch.py`, then read the difference.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from jetrl_megatron import site as sites
from jetrl_megatron.commands import launch
from jetrl_megatron.config import ConfigError, apply_overrides
from jetrl_megatron.env_list import ENV_SH, differences, effective, entries, numerics
from jetrl_megatron.launcher import ranks_per_node
from jetrl_megatron.memory import gpus
from jetrl_recipes import registry

GOLDEN = Path(__file__).parent / "golden"
EXAMPLE = sites.EXAMPLE.read_text()
BARE = """\
[slurm]
account = "me"
partition = "gpu"
exclusive = false
gres = true
grace = 900
time = "1-00:00:00"
[paths]
jobs = "/shared/me/jetrl"
[python]
bin = "/shared/me/venv/bin"
"""


def site(tmp_path: Path, text: str = EXAMPLE) -> sites.Site:
    file = tmp_path / "site.toml"
    file.write_text(text)
    return sites.load(file)


def rendered(tmp_path: Path, recipe: str, overrides: list[str], text: str, **environ: str) -> str:
    where = site(tmp_path, text)
    folder = Path("/shared/me/jetrl/runs/r")
    job = launch.make_job(recipe, overrides, where, run_folder=folder, environ=environ)
    return launch.render(job, where, "20260101-000000")


@pytest.mark.parametrize(
    ("name", "recipe", "overrides", "text"),
    [
        ("container", "qwen3_32b_8k_jetrl", ["grpo.group_size=16", 'data.options={"name": "main"}'], EXAMPLE),
        ("bare", "qwen3_0_6b_2gpu_bf16", [], BARE),
        ("cpu", "tiny_cpu_jetrl", ["parallel.nodes=2"], BARE),
    ],
)
def test_golden_script(tmp_path: Path, name: str, recipe: str, overrides: list[str], text: str):
    script = rendered(tmp_path, recipe, overrides, text)
    file = GOLDEN / f"{name}.sbatch"
    if os.environ.get("JETRL_UPDATE_GOLDEN"):
        file.write_text(script)
    assert script == file.read_text()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert rendered(tmp_path, recipe, overrides, text) == script, "rendering leaves something behind"


def test_every_variable_reaches_the_container(tmp_path: Path):
    script = rendered(tmp_path, "qwen3_8b_base_8k_jetrl", [], EXAMPLE, NCCL_ALGO="Ring Tree", HF_TOKEN="secret")
    line = next(line for line in script.splitlines() if line.startswith("srun --output"))
    words = shlex.split(line)
    reached = words[words.index("--container-env") + 1].split(",")
    exported = [
        line.split("=")[0].removeprefix("export ") for line in script.splitlines() if line.startswith("export ")
    ]
    assert {"NCCL_ALGO", "NCCL_IB_HCA", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "JETRL_RUN_DIR"} <= set(reached)
    assert set(reached) == set(exported) - {"SLURM_UNBUFFEREDIO", "TORCHX_MAX_RETRIES"}
    assert "export NCCL_ALGO='Ring Tree'" in script
    assert "HF_TOKEN" not in script


def test_one_task_a_node_and_no_launcher_of_nemo_runs(tmp_path: Path):
    script = rendered(tmp_path, "qwen3_32b_8k_jetrl", [], EXAMPLE)
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n" in script
    assert "torchrun" not in script
    assert (
        "bash slurm/task.sh bash slurm/train.sh qwen3_32b_8k_jetrl --set model.path=/shared/models/Qwen3-32B" in script
    )


def test_thirty_two_nodes_differ_from_four_by_their_number_alone(tmp_path: Path):
    sizes = ["parallel.nodes=32", "parallel.dp=16", "rollout.replicas=64"]
    script = rendered(tmp_path, "qwen3_32b_16k_jetrl", sizes, EXAMPLE)
    for line in ("nodes=32", "ntasks-per-node=1", "gpus-per-node=8", "signal=USR1@600", "open-mode=append"):
        assert f"#SBATCH --{line}\n" in script
    words = " ".join(f"--set {size}" for size in sizes)
    four = rendered(tmp_path, "qwen3_32b_16k_jetrl", [], EXAMPLE)
    assert script.replace(f" {words}", "").replace("--nodes=32", "--nodes=4") == four
    config = apply_overrides(registry.get("qwen3_32b_16k_jetrl"), sizes)
    assert ranks_per_node(config, 32) == 8


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("qwen3_8b_base_8k_jetlr", [], "did you mean 'qwen3_8b_base_8k_jetrl'"),
        ("qwen3_8b_base_8k_jetrl", ["grpo.group_sise=4"], "did you mean 'grpo.group_size'"),
        ("qwen3_8b_base_8k_jetrl", ["parallel.nodes=3"], "8 ranks do not divide over 3 nodes"),
        ("qwen3_8b_base_8k_jetrl", ["train.micro_batch_size=9"], "memory: training needs"),
        ("qwen3_30b_a3b_8k_bf16", [], "is a mixture of experts: converted and estimated, but not trained yet"),
        ("qwen3_8b_base_8k_jetrl", ["grpo.group_size=1"], "a group needs at least 2 answers"),
        ("qwen3_8b_base_8k_jetrl", ["model.path=models/Qwen2.5-0.5B", "parallel.tp=2", "parallel.dp=4"], "tiles break"),
    ],
)
def test_bad_recipe_is_refused_before_anything_is_rendered(
    tmp_path: Path, recipe: str, overrides: list[str], words: str
):
    with pytest.raises(ConfigError, match=words):
        rendered(tmp_path, recipe, overrides, EXAMPLE)


def test_a_model_of_ones_own_is_looked_up_where_the_site_keeps_models(tmp_path: Path):
    from jetrl_conversion.known_models import known_config

    text = EXAMPLE.replace("/shared", str(tmp_path))
    with pytest.raises(ConfigError, match="Mine: no such folder or file, and no known model"):
        rendered(tmp_path, "qwen3_8b_base_8k_jetrl", ["model.path=models/Mine"], text)
    (tmp_path / "models/Mine").mkdir(parents=True)
    (tmp_path / "models/Mine/config.json").write_text(json.dumps(known_config("Qwen3-8B")))
    script = rendered(tmp_path, "qwen3_8b_base_8k_jetrl", ["model.path=models/Mine"], text)
    assert f"--set model.path={tmp_path}/models/Mine" in script


def test_more_gpus_a_node_than_the_cluster_has(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"32 GPUs on 4 nodes are 8 a node, this cluster has 4"):
        rendered(tmp_path, "qwen3_32b_8k_bf16", [], EXAMPLE.replace("gpus_per_node = 8", "gpus_per_node = 4"))


def test_every_recipe_can_be_launched(tmp_path: Path):
    where = site(tmp_path)
    for name in registry.names():
        if "a3b" in name:
            continue
        job = launch.make_job(name, [], where, run_folder=tmp_path, environ={})
        assert job.nodes * job.gpus_per_node == gpus(registry.get(name))


def test_local_run_that_fails_is_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """All the way through NeMo-Run's local executor, task.sh and train.sh; the model is not on this machine."""
    overrides = [f"model.path={tmp_path}/models/Qwen3-0.6B"]
    assert launch.run("qwen3_0_6b_2gpu_jetrl", overrides, executor="local", output=tmp_path / "run") == 1
    assert "Qwen3-0.6B holds no config.json" in "".join(capfd.readouterr())


@pytest.mark.parametrize(("script", "succeeds"), [("sleep 4", True), ('test "$JETRL_RUN_DIR" = elsewhere', False)])
def test_result_of_a_local_run(tmp_path: Path, script: str, succeeds: bool):
    import nemo_run

    job = launch.make_job("tiny_cpu_jetrl", [], None, run_folder=tmp_path, environ={})
    assert launch.run_local(job, "now", nemo_run.Script(inline=script)) is succeeds


def test_site_lists_every_problem(tmp_path: Path):
    text = """
    acount = 1
    [slurm]
    partition = 7
    time = "four hours"
    grace = 5
    [paths]
    jobs = "rel ative"
    [container]
    image = "x.sqsh"
    mounts = ["/a"]
    [python]
    bin = "/venv/bin"
    [env]
    NCCL_IB_HAC = "mlx5"
    HF_TOKEN = "secret"
    """
    with pytest.raises(ConfigError) as error:
        site(tmp_path, text)
    found = "\n".join(error.value.problems)
    for words in (
        "acount: unknown key",
        "slurm.partition: 7 is not a str",
        "slurm.account: missing",
        "slurm.time: 'four hours' is not a Slurm time",
        "slurm.grace: 5 s are shorter",
        "paths.jobs: 'rel ative' is not an absolute path",
        "paths.jobs: 'rel ative' has a space in it",
        "container.mounts: '/a' is not /outside:/inside",
        "python.bin: the container has its own",
        "env.NCCL_IB_HAC: not on the list of slurm/env.sh, did you mean 'NCCL_IB_HCA'",
        "env.HF_TOKEN: not on the list",
    ):
        assert words in found
    assert all(str(tmp_path / "site.toml") in line for line in error.value.problems)


def test_container_must_see_the_folders(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"paths.models: /models is under none of container.mounts"):
        site(tmp_path, EXAMPLE.replace('"/shared/models"', '"/models"'))


def test_jobs_have_one_path_outside_and_inside(tmp_path: Path):
    """Slurm opens the log and the batch script makes the run's folder on the host."""
    with pytest.raises(ConfigError, match=r"paths.jobs: /shared/me/jetrl must have the same path outside: mount /sha"):
        site(tmp_path, EXAMPLE.replace('"/shared:/shared"', '"/lustre:/shared:rw+rprivate"'))


def test_site_and_recipe_are_refused_at_once(tmp_path: Path):
    (tmp_path / "site.toml").write_text(EXAMPLE.replace("partition", "partitoin"))
    with pytest.raises(ConfigError) as error:
        launch.run("tiny_cpu_jetrl", ["grpo.group_sise=4"], site=tmp_path / "site.toml")
    words = ("slurm.partitoin: unknown key, did you mean 'partition'", "slurm.partition: missing", "grpo.group_size")
    assert all(word in found for word, found in zip(words, error.value.problems, strict=True))


def test_example_site_is_not_submitted_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as error:
        launch.run("tiny_cpu_jetrl", site=sites.EXAMPLE, allow_dirty=True)
    assert [p.partition(": ")[0] for p in error.value.problems] == [
        f"{sites.EXAMPLE} is still the example",
        "no sbatch on this machine",
    ]


def test_missing_site_file_says_how_to_write_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"copy slurm/site\.example\.toml"):
        sites.load(tmp_path / "none.toml")


def test_shell_and_python_read_the_same_list():
    """What `. slurm/env.sh` exports is what `effective` says, for a bare environment and for one with own values."""
    for own in ({}, {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0 x", "HF_HOME": ""}):
        script = f'set -eu; . "{ENV_SH}"; for n in ${{JETRL_ENV_NAMES//,/ }}; do printf "%s=%s\\n" "$n" "${{!n}}"; done'
        result = subprocess.run(["bash", "-c", script], env=own, capture_output=True, text=True, check=True)
        assert dict(line.split("=", 1) for line in result.stdout.splitlines()) == effective(own)
        exported = subprocess.run(["bash", "-c", f'. "{ENV_SH}"; env'], env=own, capture_output=True, text=True).stdout
        names = {line.split("=")[0] for line in exported.splitlines()}
        assert names & set(entries()) == set(effective(own))


def test_precedence_of_values():
    name = "NCCL_DEBUG"
    assert effective({})[name] == "WARN"
    assert effective({}, {name: "INFO"})[name] == "INFO"
    assert effective({name: "TRACE"}, {name: "INFO"})[name] == "TRACE"
    assert "NCCL_IB_HCA" not in effective({})


def test_processes_that_disagree_on_numerics_are_named():
    assert "VLLM_USE_DEEP_GEMM_E8M0" in numerics() and "NCCL_IB_HCA" not in numerics()
    same = {"VLLM_USE_DEEP_GEMM_E8M0": "0", "NCCL_IB_HCA": "a"}
    assert differences({"rank 0": same, "engine 0": same | {"NCCL_IB_HCA": "b"}}) == []
    other = {"VLLM_USE_DEEP_GEMM_E8M0": "1", "MKL_CBWR": "AVX2"}
    assert differences({"rank 0": same, "rank 1": same, "engine 0": other}) == [
        "VLLM_USE_DEEP_GEMM_E8M0 differs: rank 0, rank 1: '0'; engine 0: '1'",
        "MKL_CBWR differs: rank 0, rank 1: not set; engine 0: 'AVX2'",
    ]
