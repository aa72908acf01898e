"""A real Slurm cluster of two nodes on one machine, for tests.

Debian's slurmctld and munged run as they are; each slurmd lives in its own network, IPC, mount, UTS and PID
namespace, with its own address, host name, /dev/shm and /tmp. What only works on one host fails here: `localhost`
rendezvous, files in /tmp, shared memory, CUDA-IPC-like handles. Shared between the nodes, as on a cluster: the
checkout, the home folder and the cluster's folder in /var/tmp.

Needs root and the packages of install.sh. Nothing outside this machine is contacted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
NODES = ("n1", "n2")
TOOLS = ("slurmctld", "slurmd", "munged", "ip", "unshare")

# MessageTimeout, SlurmdTimeout: a busy machine answers late; its nodes are not down.
# cred_expire: a re-queued job waits for as long before it may start again (2 minutes by default).
# GraceTime: from the warning of a preempted job (SIGTERM) to its end.
CONF = """\
ClusterName=jetrl
SlurmctldHost={host}({net}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={work}/munge.socket,cred_expire=5
CryptoType=crypto/munge
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={slurmd_port}
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/%n/slurmd.pid
SlurmctldLogFile={work}/slurmctld.log
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/%n/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
KillWait=20
MessageTimeout=60
SlurmdTimeout=0
MinJobAge=3600
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
SchedulerTimeSlice=5
PriorityType=priority/basic
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def unavailable() -> str:
    """Why the cluster cannot run here, or an empty string."""
    if os.geteuid() != 0:
        return "needs root (network and mount namespaces)"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    return f"run tests/slurm/install.sh: {', '.join(missing)} missing" if missing else ""


@dataclass
class Cluster:
    work: Path

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.work / "slurm.conf")}

    def run(self, *command: str, check: bool = True, **kwargs) -> subprocess.CompletedProcess[str]:
        """Run a Slurm client command (or anything else) against this cluster."""
        env = self.env | kwargs.pop("env", {})
        result = subprocess.run(command, capture_output=True, text=True, env=env, **kwargs)
        if check and result.returncode:
            raise AssertionError(f"{' '.join(command)}: exit {result.returncode}\n{result.stdout}{result.stderr}")
        return result

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` knows: JobState, Restarts, ExitCode, ..."""
        words = self.run("scontrol", "show", "job", job_id).stdout.split()
        return {key: value for key, _, value in (word.partition("=") for word in words if "=" in word)}

    def wait(self, job_id: str, *states: str, timeout: float) -> dict[str, str]:
        """Wait until the job is in one of `states` (default: any final one).

        Raises:
            TimeoutError: with the job's record and the end of the node daemons' logs.
        """
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        deadline = time.monotonic() + timeout
        while (job := self.job(job_id))["JobState"] not in wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is {job['JobState']}, not {wanted}: {job}\n{self.logs()}")
            time.sleep(0.5)
        return job

    def logs(self) -> str:
        files = [self.work / "slurmctld.log", *(self.work / node / "slurmd.log" for node in NODES)]
        return "\n".join(f"--- {f.name}\n" + "\n".join(f.read_text().splitlines()[-25:]) for f in files if f.exists())


def _ip(*args: str, check: bool = True) -> None:
    subprocess.run(["ip", *args], check=check, capture_output=not check)


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start the cluster, yield it, take everything away again."""
    tag = secrets.token_hex(2)
    net = f"10.213.{secrets.randbelow(250)}"
    work = Path(tempfile.mkdtemp(prefix="jetrl-slurm-", dir="/var/tmp"))
    for folder in ("state", *NODES, *(f"{node}/spool" for node in NODES)):
        (work / folder).mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        _configure(work, net)
        _network(stack, tag, net)
        key = work / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        # --force: the folder's parents are not owned by a munge user.
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={work}/munge.socket"]
        munge += [f"--pid-file={work}/munge.pid", f"--log-file={work}/munge.log", f"--seed-file={work}/munge.seed"]
        _start(stack, munge, work)
        _wait_for(lambda: (work / "munge.socket").exists(), "munged")
        _start(stack, ["slurmctld", "-D", "-f", str(work / "slurm.conf")], work)
        daemons = []
        for node in NODES:
            spaces = ["unshare", "--ipc", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
            start = ["bash", str(HERE / "node.sh"), node, str(work), str(REPO)]
            daemons.append(_start(stack, ["ip", "netns", "exec", f"jetrl-{tag}-{node}", *spaces, *start], work))
        running = Cluster(work)

        def ready() -> bool:
            if any(daemon.poll() is not None for daemon in daemons):
                raise TimeoutError("slurmd ended at once")
            states = running.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).stdout.split()
            return states == ["idle"] * len(NODES)

        try:
            _wait_for(ready, "slurmd on both nodes")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{running.logs()}") from None
        yield running


def _configure(work: Path, net: str) -> None:
    cpus = os.cpu_count() or 1
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={net}.{11 + i} CPUs={cpus} State=UNKNOWN" for i, node in enumerate(NODES)
    )
    port = 16000 + secrets.randbelow(1000)
    values = {"host": socket.gethostname(), "net": net, "work": work, "port": port, "slurmd_port": port + 1000}
    # Names the version, or slurmd looks for a mounted cgroup file system, which no plugin here uses.
    (work / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (work / "slurm.conf").write_text(CONF.format(nodes=nodes, **values))
    lines = ["127.0.0.1 localhost", f"{net}.1 {socket.gethostname()}"]
    (work / "hosts").write_text("\n".join(lines + [f"{net}.{11 + i} {node}" for i, node in enumerate(NODES)]) + "\n")


def _network(stack: contextlib.ExitStack, tag: str, net: str) -> None:
    """A bridge on the host, and a namespace with one address for each node."""
    bridge = f"jetrl{tag}"
    _ip("link", "add", bridge, "type", "bridge")
    stack.callback(_ip, "link", "del", bridge, check=False)
    _ip("addr", "add", f"{net}.1/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    for i, node in enumerate(NODES):
        space, outside = f"jetrl-{tag}-{node}", f"jr{tag}{node}"
        _ip("netns", "add", space)
        stack.callback(_ip, "netns", "del", space, check=False)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        stack.callback(_ip, "link", "del", outside, check=False)
        _ip("link", "set", outside, "master", bridge, "up")
        _ip("-n", space, "addr", "add", f"{net}.{11 + i}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")


def _start(stack: contextlib.ExitStack, command: list[str], work: Path) -> subprocess.Popen:
    log = stack.enter_context((work / f"start-{command[0]}.log").open("ab"))
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def stop() -> None:
        # Killing `unshare` takes the namespace with everything in it; there is no state worth a slow goodbye.
        process.kill()
        process.wait()

    stack.callback(stop)
    return process


def _wait_for(condition, what: str, timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up in {timeout:.0f} s")
        time.sleep(0.2)
