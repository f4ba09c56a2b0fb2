"""How the ranks of a trial are started, and what carries their data."""

import functools
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.networks.emulation import TwoHosts
from tests.processes import mpiexec_command

_PRIVATE = ("unshare", "--mount", "sh", "-c")

Programs = list[list[str]]  # commands


def _plain(n: int, script: list[str], net: TwoHosts | None) -> Programs:
    return [script]


def _by_mpiexec(n: int, script: list[str], net: TwoHosts | None) -> Programs:
    return [net.mpiexec(n // 2, script) if net else [*mpiexec_command(n), *script]]


def _by_run(n: int, script: list[str], net: TwoHosts | None) -> Programs:
    words = script.index("-m")
    agent = [*script[:words], "-m", "distopt", "run"]
    if net is None:
        return [[*agent, "--nproc-per-node", str(n), *script[words:]]]
    endpoint = f"{net.hosts[0].address}:{random.randrange(1 << 14, 1 << 15)}"
    options = ["--nnodes", "2", "--nproc-per-node", str(n // 2), "--rdzv-endpoint", endpoint]
    return [host.inside([*agent, *options, *script[words:]]) for host in net.hosts]


def _numbered(
    n: int, script: list[str], net: TwoHosts | None, numbers: Callable[[TwoHosts, int, int], dict[str, str]]
) -> Programs:
    """On each host a shell that starts the ranks with variables and waits for them."""
    assert net is not None
    programs: Programs = []
    for node, host in enumerate(net.hosts):
        lines = []
        for local in range(n // 2):
            words = " ".join(f"{k}={v}" for k, v in numbers(net, node * (n // 2) + local, local).items())
            lines.append(f'env {words} "$@" & pids="$pids $!"')
        lines.append("code=0; for pid in $pids; do wait $pid || code=$?; done; exit $code")
        programs.append(host.inside(["sh", "-c", "\n".join(lines), "node", *script]))
    return programs


def _by_srun(n: int, script: list[str], net: TwoHosts | None) -> Programs:
    job = random.randrange(1 << 30)

    def numbers(net: TwoHosts, rank: int, local: int) -> dict[str, str]:
        return {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(n),
            "SLURM_LOCALID": str(local),
            "SLURM_JOB_ID": str(job),
            "SLURM_CLUSTER_NAME": "test",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": net.hosts[0].address,
            "SLURM_STEP_NUM_NODES": "2",
        }

    return _numbered(n, script, net, numbers)


def _by_hand(n: int, script: list[str], net: TwoHosts | None) -> Programs:
    port = random.randrange(1 << 15, 1 << 16)

    def numbers(net: TwoHosts, rank: int, local: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(n // 2),
            "MASTER_ADDR": net.hosts[0].address,
            "MASTER_PORT": str(port),
        }

    return _numbered(n, script, net, numbers)


class Way(NamedTuple):
    """One way to start ranks.

    Attributes:
        start: as `instruments.faults.job` takes it.
        transport: DISTOPT_TRANSPORT.
        programs: from number of ranks, script and hosts to what is to be started.
        hosts: number of hosts; two are network namespaces.
        sizes: numbers of ranks.
        tells_codes: whether the program ends with the exit code of the rank that failed.
        apart: whether a program knows nothing of the ranks on the other host, as a shell that starts its own.
    """

    start: str
    transport: str
    programs: Callable[[int, list[str], TwoHosts | None], Programs]
    hosts: int = 1
    sizes: tuple[int, ...] = (2, 2, 3, 4)
    tells_codes: bool = False
    apart: bool = False

    @property
    def by_mpiexec(self) -> bool:
        """Whether mpiexec starts the ranks."""
        return self.programs is _by_mpiexec


WAYS = {
    "main": Way("main", "shm", _plain, tells_codes=True),
    "raw": Way("raw", "shm", _plain, tells_codes=True),
    "mpiexec shm": Way("rank", "shm", _by_mpiexec),
    "mpiexec mpi": Way("rank", "mpi", _by_mpiexec),
    "run": Way("rank", "shm", _by_run, tells_codes=True),
    "hosts hier": Way("rank", "hierarchical", _by_mpiexec, 2, (4,)),
    "hosts mpi": Way("rank", "mpi", _by_mpiexec, 2, (2, 4)),
    "hosts run": Way("rank", "ucx", _by_run, 2, (2, 4), tells_codes=True),
    "hosts srun": Way("rank", "ucx", _by_srun, 2, (2, 4), apart=True),
    "hosts by hand": Way("rank", "ucx", _by_hand, 2, (2, 4), apart=True),
}


def possible_ways(*, hosts: bool) -> dict[str, Way]:
    """The ways of one host, and of two if there are `hosts`."""
    return {name: way for name, way in WAYS.items() if way.hosts == 1 or hosts}


def own_memory(folder: Path) -> list[str]:
    """The start of a command line whose /dev/shm is `folder`, where that is allowed: other jobs may be at work here."""
    return [*_PRIVATE, 'mount --bind "$0" /dev/shm && exec "$@"', str(folder)] if can_mount() else []


def nearly_full(folder: str) -> list[str]:
    """The start of a command line to which no more than 4 KiB fit into a folder."""
    return [*_PRIVATE, 'mount -t tmpfs -o size=4k tmpfs "$0" && exec "$@"', folder]


@functools.cache
def can_mount() -> bool:
    """Whether this process may give a program a /dev/shm of its own."""
    done = subprocess.run([*_PRIVATE, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, check=False)
    return done.returncode == 0
