"""A real Slurm on this machine: a front end and two nodes. Needs root, and Debian's packages of Slurm.

Each host is a network namespace with a host name of its own; a bridge joins them. The controller runs on `head`, where
jobs are submitted, and a daemon on each of `node1` and `node2`. The file system is that of this machine. All daemons
end with the process that has started them.

    python -m instruments.slurm.cluster COMMAND...     runs the command on head, by default a shell
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libpmix-dev", "iproute2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "ip")
LINK = "eth0"  # a node's interface to the others
NODES = ("node1", "node2")
_ADDRESSES = {"head": "10.214.33.254", "node1": "10.214.33.1", "node2": "10.214.33.2"}
_START_SECONDS = 120.0
_INSTALL_SECONDS = 180.0
_HASTE = ("--option", "Acquire::Retries=1", "--option", "Acquire::http::Timeout=20")  # where there is no network

# A job that is queued again waits until the credentials of its first run have expired, by default 120 s. Jobs of
# `urgent` end those of `main`, which get SIGTERM and then `GraceTime` seconds. A daemon keeps what must not be shared
# with the other node in `private`, which is another folder on each host.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=head({head})
SlurmctldPort=36917
SlurmdPort=36918
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={here}/munge/socket,cred_expire=5
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/private/spool
SlurmctldPidFile={here}/private/slurmctld.pid
SlurmdPidFile={here}/private/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
KillWait=10
JobRequeue=1
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeAddr={node1} CPUs=4 RealMemory=1000
NodeName=node2 NodeAddr={node2} CPUs=4 RealMemory=1000
PartitionName=main Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=node[1-2] PriorityTier=2 PreemptMode=OFF
"""

# Lets a process see the machine as the host does. /sys must be mounted anew to show the interfaces of the
# network namespace, but the control groups of the machine are needed in it. Names in /dev/shm must not meet.
_ENTER = """\
#!/bin/sh -e
here=$1 host=$2
shift 2
hostname "$host"
mount --bind "$here/hosts" /etc/hosts
mount --bind "$here/of-$host" "$here/private"
mount -t tmpfs tmpfs /dev/shm
mount --rbind /sys/fs/cgroup "$here/cgroup"
mount -t sysfs sysfs /sys
mount --rbind "$here/cgroup" /sys/fs/cgroup
exec "$@"
"""


class SlurmUnavailableError(Exception):
    """This machine or this user cannot have the cluster; says why."""


class Cluster:
    """The hosts of a running cluster.

    Attributes:
        here: its folder.
        env: environment in which Slurm's programs find it.
    """

    def __init__(self, here: Path) -> None:
        self.here = here
        self.env = {**os.environ, "SLURM_CONF": str(here / "slurm.conf")}
        for name in [name for name in self.env if name.startswith("SLURM_") and name != "SLURM_CONF"]:
            del self.env[name]
        self._daemons: list[subprocess.Popen[bytes]] = []

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """`command` as a process of this host."""
        enter = ["nsenter", f"--net=/run/netns/{_namespace(host)}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", str(self.here / "enter"), str(self.here), host, *command]

    def run(
        self, command: Sequence[str], *, host: str = "head", env: dict[str, str] | None = None, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host; the output of both streams is `stdout`."""
        return subprocess.run(
            self.on(host, command),
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def bytes_sent(self) -> dict[str, int]:
        """Bytes sent by each node through its interface since the cluster was started."""
        command = ["ip", "-json", "-stats", "link", "show", LINK]
        return {node: json.loads(self.run(command, host=node).stdout)[0]["stats64"]["tx"]["bytes"] for node in NODES}

    def start(self) -> None:
        """Start all daemons, and wait for the nodes."""
        for name in ("state", "munge", "private", "cgroup", *(f"of-{host}/pmix" for host in _ADDRESSES)):
            (self.here / name).mkdir(parents=True)
        for name in ("", "munge"):  # which munged wants to be searchable
            (self.here / name).chmod(0o755)
        (self.here / "enter").write_text(_ENTER)
        (self.here / "slurm.conf").write_text(_CONFIGURATION.format(here=self.here, **_ADDRESSES))
        (self.here / "mpi.conf").write_text(f"PMIxCliTmpDirBase={self.here}/private/pmix\n")
        names = "".join(f"{address} {host}\n" for host, address in _ADDRESSES.items())
        (self.here / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        _start_network()
        self._start_munge()
        self._start("head", "slurmctld", ["slurmctld", "-D", "-i"])
        for node in NODES:
            self._start(node, node, ["slurmd", "-D", "-N", node])
        self._wait_for_nodes()

    def _start_munge(self) -> None:
        munge = self.here / "munge"
        key = munge / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._start("head", "munged", ["munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files])
        _wait_until((munge / "socket").exists, "munged does not answer", self.here)

    def _start(self, host: str, name: str, command: Sequence[str]) -> None:
        ending = ["setpriv", "--pdeathsig", "KILL"]
        with (self.here / f"{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    self.on(host, [*ending, *command]),
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _wait_for_nodes(self) -> None:
        command = ["sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D"]
        _wait_until(lambda: self.run(command).stdout.strip() == "2", "Slurm's nodes do not come up", self.here)

    def stop(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run(["scancel", "--full", "--signal=KILL", "--user=root"])
            began = time.monotonic()
            while self.run(["squeue", "--noheader"]).stdout.strip() and time.monotonic() < began + 10:
                self.run(["scancel", "--user=root"])
                time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        _stop_network()


def _namespace(host: str) -> str:
    return f"distopt-slurm-{os.getpid()}-{host}"


def _ip(*words: str, host: str = "") -> None:
    subprocess.run(["ip", *(["-n", _namespace(host)] if host else []), *words], check=True)


def _start_network() -> None:
    for host in _ADDRESSES:
        _ip("netns", "add", _namespace(host))
        _ip("link", "set", "lo", "up", host=host)
    _ip("link", "add", LINK, "type", "bridge", host="head")
    for node in NODES:
        _ip("link", "add", node, "type", "veth", "peer", "name", LINK, "netns", _namespace(node), host="head")
        _ip("link", "set", node, "master", LINK, "up", host="head")
    for host, address in _ADDRESSES.items():
        _ip("address", "add", f"{address}/24", "dev", LINK, host=host)
        _ip("link", "set", LINK, "up", host=host)


def _stop_network() -> None:
    """Remove the namespaces of this process, and those of processes that were killed."""
    for namespace in Path("/run/netns").glob("distopt-slurm-*-*"):
        pid = namespace.name.split("-")[2]
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():
            _ip("netns", "delete", namespace.name)


def _wait_until(done, complaint: str, here: Path) -> None:
    began = time.monotonic()
    while not done():
        if time.monotonic() > began + _START_SECONDS:
            last = [f"{log.name}: {lines[-1]}" for log in here.glob("*.log") if (lines := log.read_text().splitlines())]
            raise SlurmUnavailableError(f"{complaint} within {_START_SECONDS:g} s; {'; '.join(last)}")
        time.sleep(0.1)


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise SlurmUnavailableError("network namespaces need root")
    if not all(map(shutil.which, PROGRAMS)):
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
            try:
                done = subprocess.run(
                    ["apt-get", "--quiet", *_HASTE, *words],
                    env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                    capture_output=True,
                    text=True,
                    timeout=_INSTALL_SECONDS,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SlurmUnavailableError(f"Slurm is not installed, and apt-get cannot be run: {error}") from None
            if done.returncode:
                said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise SlurmUnavailableError(f"Slurm is not installed, and apt-get {words[0]} fails: {said}")
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        raise SlurmUnavailableError(f"{', '.join(missing)} not found, though Slurm's packages are installed")


@contextlib.contextmanager
def slurm() -> Iterator[Cluster]:
    """Start the cluster; the context's end stops it, and whatever runs there.

    Raises:
        SlurmUnavailableError: it cannot be started.
    """
    _check_machine()
    _stop_network()
    with tempfile.TemporaryDirectory(prefix="distopt-slurm-") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        except subprocess.CalledProcessError as error:
            raise SlurmUnavailableError(f"{' '.join(error.cmd)} has failed ({error.returncode})") from None
        finally:
            cluster.stop()


if __name__ == "__main__":
    with slurm() as running:
        sys.exit(subprocess.run(running.on("head", sys.argv[1:] or ["bash"]), env=running.env, check=False).returncode)
