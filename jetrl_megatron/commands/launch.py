"""`jetrl launch RECIPE`: the same job as `sbatch slurm/train.sbatch`, rendered and submitted by NeMo-Run.

Task and executor stay apart: `make_job` turns recipe and site into a `Job` (what runs, where, how large), `task` makes
it a NeMo-Run script, `local_executor` and `slurm_executor` say how it runs. Every node runs one task,
`slurm/task.sh slurm/train.sh RECIPE`, which starts the node's ranks itself; NeMo-Run's own torchrun launcher is not
used (with one task a node it would start one rank). Slurm is reached by the local `sbatch`: run it on a login node.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal, TextIO

from jetrl_megatron import site as sites
from jetrl_megatron.config import ConfigError, apply_overrides
from jetrl_megatron.env_list import REPO, effective
from jetrl_megatron.hardware import gpu
from jetrl_megatron.memory import gpus, gpus_per_node, problems, spec_of, training_problems
from jetrl_megatron.site import Site

ExecutorName = Literal["local", "slurm"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What runs and how large it is; nothing about how it is submitted."""

    name: str
    arguments: tuple[str, ...]
    """Of slurm/train.sh: the recipe and its overrides."""
    nodes: int
    gpus_per_node: int
    """0 on a CPU."""
    run_folder: Path
    env: dict[str, str]


def make_job(
    recipe: str,
    overrides: Sequence[str],
    site: Site | None,
    *,
    run_folder: Path,
    environ: Mapping[str, str],
    device: str = "h100",
) -> Job:
    """Check a recipe against the cluster and size its job.

    Raises:
        ConfigError: every problem of the recipe, of its layout and memory, and of its size on this cluster.
    """
    from jetrl_recipes import registry

    config = apply_overrides(registry.get(recipe), overrides)
    found: list[str] = []
    try:
        config.validate()
    except ConfigError as error:
        found += error.problems
    extra: list[str] = []
    path = Path(config.model.path)
    if site and site.paths.models and path.parts[:1] == ("models",):
        config.model.path = str(Path(site.paths.models, *path.parts[1:]))
        extra = ["--set", f"model.path={config.model.path}"]
    found += problems(config, gpu(device)) + training_problems(spec_of(config))
    nodes, per_node = config.nodes, gpus_per_node(config)
    if site and per_node > site.slurm.gpus_per_node:
        found.append(
            f"parallel.nodes: {gpus(config)} GPUs on {nodes} nodes are {per_node} a node, "
            f"this cluster has {site.slurm.gpus_per_node} (slurm.gpus_per_node)"
        )
    if found:
        raise ConfigError(found)
    words = [word for override in overrides for word in ("--set", override)]
    return Job(
        name=recipe,
        arguments=(recipe, *words, *extra),
        nodes=nodes,
        gpus_per_node=per_node,
        run_folder=run_folder,
        env=effective(environ, {k: str(v) for k, v in site.env.items()} if site else {}),
    )


def task(job: Job, root: Path = Path()) -> Any:
    """The NeMo-Run script of one node. `root`: where the code lies; a Slurm job starts in its packaged copy."""
    run = _nemo_run()
    words = ["bash", str(root / "slurm/train.sh"), *job.arguments]
    return run.Script(path=str(root / "slurm/task.sh"), args=[shlex.quote(word) for word in words])


def _nemo_run() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nemo_run
    return nemo_run


def _exports(job: Job, site: Site | None) -> dict[str, str]:
    own = {"JETRL_RUN_DIR": str(job.run_folder)}
    if site and site.python.bin:
        own["JETRL_BIN"] = site.python.bin
    return {name: shlex.quote(value) for name, value in (job.env | own).items()}


def slurm_executor(job: Job, site: Site) -> Any:
    """Renders into `#SBATCH` lines and one `srun`."""
    run = _nemo_run()
    s, exports = site.slurm, _exports(job, site)
    count = job.gpus_per_node or None
    # Without its first line (#!) and without jetrl_srun: NeMo-Run writes the srun line.
    job_sh = (REPO / "slurm" / "job.sh").read_text().partition("# Run a command on every node")[0].partition("\n")[2]
    return run.SlurmExecutor(
        account=s.account,
        partition=s.partition,
        qos=s.qos or None,
        time=s.time,
        nodes=job.nodes,
        ntasks_per_node=1,
        gpus_per_node=None if s.gres else count,
        gres=f"gpu:{count}" if s.gres and count else None,
        exclusive=s.exclusive or None,
        mem="0" if s.exclusive else None,
        signal=f"USR1@{s.grace}",
        job_name_prefix="jetrl-",
        additional_parameters={key.replace("-", "_"): value for key, value in s.options.items()} or None,
        env_vars=exports,
        container_image=site.container.image or None,
        container_mounts=list(site.container.mounts),
        # A container image's own ENV would win over what srun hands on: these names are taken from the job.
        container_env=list(exports) if site.container.image else None,
        srun_args=["--cpu-bind=none", *(["--label"] if job.nodes > 1 else [])],
        # NeMo-Run prints every line it runs (the job's own messages would drown), and asks srun for unbuffered output,
        # which puts the tasks on a pseudo-terminal (progress bars in log files).
        setup_lines="set +vx\nunset SLURM_UNBUFFEREDIO\n" + job_sh,
        tunnel=run.LocalTunnel(job_dir=str(Path(site.paths.jobs) / "experiments")),
        packager=run.GitArchivePackager(ref="HEAD", include_submodules=False),
        poll_estimated_start_time=False,
    )


def local_executor(job: Job) -> Any:
    """This machine, this Python, this working tree."""
    run = _nemo_run()
    own = {"JETRL_RUN_DIR": str(job.run_folder), "JETRL_BIN": str(Path(sys.executable).parent)}
    return run.LocalExecutor(env_vars=job.env | own, packager=run.Packager())


def render(job: Job, site: Site, stamp: str) -> str:
    """The exact sbatch script that `submit` hands to Slurm. Nothing is left behind."""
    with (
        tempfile.TemporaryDirectory(prefix="jetrl-launch-") as home,
        _experiment(job, stamp, home, StringIO()) as experiment,
    ):
        experiment.add(task(job), executor=slurm_executor(job, site), name=job.name, tail_logs=False)
        experiment.dryrun(log=False, delete_exp_dir=False)
        return next(Path(experiment._exp_dir).glob("*_sbatch.sh")).read_text() + "\n"


def submit(job: Job, site: Site, stamp: str) -> tuple[str, Path]:
    """Package the code, hand the job to Slurm.

    Returns:
        (Slurm job id, folder of its code and logs).

    Raises:
        ConfigError: Slurm refused the job, or the code could not be packaged, in their own words.
    """
    from invoke.exceptions import UnexpectedExit

    said = StringIO()
    with _experiment(job, stamp, site.paths.jobs, said) as experiment:
        experiment.add(task(job), executor=slurm_executor(job, site), name=job.name, tail_logs=False)
        try:
            experiment.run(detach=True)
        except UnexpectedExit as error:
            lines = error.result.stderr.strip().splitlines()
            what = "Slurm refused the job" if "sbatch" in error.result.command else "packaging the code failed"
            raise ConfigError([f"{what}: {line}" for line in lines]) from None
        except Exception:
            print(said.getvalue(), file=sys.stderr)
            raise
        return experiment.jobs[0].handle.rpartition("/")[2], Path(experiment._exp_dir) / job.name


def run_local(job: Job, stamp: str, script: Any = None) -> bool:
    """Run `task` (or another script) on this machine and wait, its output on the terminal; whether it succeeded."""
    with _experiment(job, stamp, str(job.run_folder / "nemo_run")) as experiment:
        experiment.add(script or task(job, REPO), executor=local_executor(job), name=job.name, tail_logs=True)
        experiment.run(tail_logs=True)
        only = experiment.jobs[0]
    # Leaving the experiment is what waits for its job.
    return str(only.state) == "SUCCEEDED"


@contextmanager
def _experiment(job: Job, stamp: str, home: str, said: TextIO | None = None) -> Iterator[Any]:
    """A NeMo-Run experiment kept in `home`; entered from the repository, whose commit it packages.

    Args:
        said: takes its talk, standard error by default.
    """
    run = _nemo_run()
    from nemo_run.config import get_nemorun_home, set_nemorun_home

    before, stdin = get_nemorun_home(), sys.stdin
    set_nemorun_home(home)
    try:
        # It runs git and sbatch with our standard input, which they do not need. It talks on our standard output, which
        # is for scripts and logs, and of `nemo` commands, which know nothing of a job's re-queues.
        with (
            open(os.devnull) as sys.stdin,
            chdir(REPO),
            redirect_stdout(said or sys.stderr),
            run.Experiment(job.name, id=f"{job.name}_{stamp}", log_level="ERROR", base_dir=home) as experiment,
        ):
            yield experiment
    finally:
        sys.stdin = stdin
        set_nemorun_home(before)


def uncommitted() -> list[str]:
    """Changed files that a job would not get, because the code is packaged from git."""
    status = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=REPO, capture_output=True, text=True
    )
    if status.returncode:
        raise ConfigError([f"{REPO} is not a git repository: the code of a Slurm job is packaged from git"])
    return [line[3:] for line in status.stdout.splitlines()]


def run(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    executor: ExecutorName = "slurm",
    site: Path | None = None,
    output: Path | None = None,
    dry_run: bool = False,
    follow: bool = False,
    allow_dirty: bool = False,
    device: str = "h100",
) -> int:
    """Launch; returns the exit status.

    Args:
        output: the run's folder; `<paths.jobs>/runs/RECIPE-<time>` by default. A folder that holds a run is continued.
        dry_run: print the sbatch script (`local`: the command) and stop.
        follow: stay, show the job's log, and return its result.
        allow_dirty: package the last commit although files have changed since.

    Raises:
        ConfigError: site file, recipe, size on this cluster, uncommitted changes, or what Slurm refused.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    if executor == "local":
        folder = (output or Path("outputs") / recipe).absolute()
        job = make_job(recipe, overrides, None, run_folder=folder, environ=os.environ, device=device)
        if dry_run:
            print(
                shlex.join(["bash", str(REPO / "slurm/task.sh"), "bash", str(REPO / "slurm/train.sh"), *job.arguments])
            )
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        return 0 if run_local(job, stamp) else 1
    loaded, job, found = None, None, []
    try:
        loaded = sites.load(site)
    except ConfigError as error:
        found += error.problems
    folder = output or Path(loaded.paths.jobs if loaded else ".") / "runs" / f"{recipe}-{stamp}"
    try:
        job = make_job(recipe, overrides, loaded, run_folder=folder.absolute(), environ=os.environ, device=device)
    except ConfigError as error:
        found += error.problems
    if found or job is None or loaded is None:
        raise ConfigError(found)
    if dry_run:
        print(render(job, loaded, stamp), end="")
        return 0
    problems = []
    if not allow_dirty and (changed := uncommitted()):
        problems.append(f"uncommitted changes would not reach the job: {', '.join(changed)} (commit, or --allow-dirty)")
    if loaded == sites.load(sites.EXAMPLE):
        problems.append(f"{site or sites.default_path()} is still the example: put in account, partition and folders")
    if not shutil.which("sbatch"):
        problems.append("no sbatch on this machine: launch from a login node of the cluster, or --executor local")
    if problems:
        raise ConfigError(problems)
    job_id, logs = submit(job, loaded, stamp)
    print(f"job {job_id}\nrun {job.run_folder}\nlogs {logs}", flush=True)
    from jetrl_megatron.slurm_follow import follow as follow_job

    return follow_job(job_id, logs) if follow else 0
