"""Limits that a job meets, whose errors have their names and cures; and odd places where it starts all the same."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from instruments.faults.ways import can_mount, nearly_full, own_memory
from tests.processes import LAUNCHED, ROOT, Program, control_group, end_all, is_open_mpi, mpiexec_command, started_by

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

SHORT = {"DISTOPT_TIMEOUT": "60"}

# Arrays of more than 100 KiB in shared memory.
LARGE = """
from distopt import comm, launch

def train(rank, n):
    comm.create(launch.join()).empty(1 << 20)

if __name__ == "__main__":
    launch.main(train, 2)
"""


launchers = pytest.mark.parametrize("launcher", ["launch.main", "distopt run"])


def started(launcher: str, n: int) -> list[str]:
    return started_by(launcher, LAUNCHED, str(n), n=n)


def limited(limit: str, command: list[str]) -> list[str]:
    return ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *command]


@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(
    ("launcher", "files"), [("launch.main", 24), ("launch.main", 32), *(("distopt run", n) for n in (8, 12, 24))]
)
def test_too_few_open_files(launcher, files):
    ended = Program(limited(f"-n {files}", started(launcher, 8)), SHORT).end()
    assert ended.code not in (0, 143), ended
    assert "Traceback" not in ended.stderr
    assert "ulimit -n" in ended.stderr


@launchers
def test_two_ranks_need_few_open_files(launcher):
    Program(limited("-n 32", started(launcher, 2))).end(code=0)


@pytest.fixture
def few_processes():
    """A control group of 8 processes and threads: the start of a command line that enters it."""
    with control_group("pids.max", "8") as group:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


@launchers
def test_too_few_processes(few_processes, launcher):
    ended = Program([*few_processes, *started(launcher, 8)], SHORT).end()
    assert ended.code not in (0, 143), ended
    assert "Traceback" not in ended.stderr
    assert re.search(r"pids\.max|ulimit -u", ended.stderr)


@pytest.mark.slow
def test_too_small_files(script):
    ended = Program(limited("-f 100", [sys.executable, script(LARGE)])).end(code=1)
    assert "bytes of shared memory for the ranks of this host: File too large" in ended.stderr
    assert "ulimit -f" in ended.stderr
    assert "enlarge /dev/shm" not in ended.stderr


# -- odd environments --------------------------------------------------------------------------------------------------
SUMS = ["[rank 1] rank 1 of 2: sum 3", "rank 0 of 2: sum 3"]


def sh(text: str) -> list[str]:
    return ["sh", "-c", f'{text} exec "$@"', "sh"]


ENVIRONMENTS = {
    # But for the one by which processes are found.
    "no variables": sh(f'exec env -i PYTHONPATH={shlex.quote(str(ROOT))} DISTOPT_TEST_RUN="$DISTOPT_TEST_RUN" "$@";'),
    "no HOME, no PATH, no TMPDIR": ["env", "-u", "HOME", "-u", "PATH", "TMPDIR=/nowhere"],
    "C locale": ["env", "LC_ALL=C", "LANG=C", "PYTHONUTF8=0", "PYTHONIOENCODING=ascii"],
    "no user's files": sh("umask 777;"),
    "a folder that has been removed": sh('folder=$(mktemp -d) && cd "$folder" && rmdir "$folder" &&'),
    "the root folder": sh("cd / &&"),
    "stdin closed": sh("exec <&-;"),
    "stdin without end": sh("exec </dev/zero;"),
    "lowest priority": ["nice", "-n", "19"],
    "one core": ["taskset", "-c", "0"],
    "signals ignored": ["env", "--ignore-signal=HUP,PIPE,CHLD"],
    "signals blocked": ["env", "--block-signal=HUP,USR1,USR2,CHLD"],
    "many descriptors": sh("exec 3<&0 4<&0 5<&0 6<&0 7<&0 8<&0 9<&0;"),
    "other warnings": ["env", "PYTHONWARNINGS=default", "PYTHONFAULTHANDLER=1", "PYTHONDONTWRITEBYTECODE=1"],
    "a WORLD_SIZE of the job script": ["env", "WORLD_SIZE=7", "MASTER_ADDR=nowhere.invalid", "MASTER_PORT=1"],
    "a network namespace without interfaces": ["unshare", "--net"],
    "a process namespace": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "a user namespace": ["unshare", "--user", "--map-root-user"],
    "a host name that nobody knows": ["unshare", "--uts", *sh("hostname no.such-host &&")],
    "a file system that is read only": ["unshare", "--mount", *sh("mount -o remount,bind,ro / &&")],
    "a full /dev/shm": nearly_full("/dev/shm"),
    "no /dev/shm": ["unshare", "--mount", *sh("mount -t tmpfs -o ro tmpfs /dev/shm &&")],
}


# Where launch.main starts processes in other ways than distopt run does.
OF_MAIN = ["no variables", "C locale", "stdin closed", "signals ignored", "a process namespace", "no /dev/shm"]
OF_MAIN += ["a full /dev/shm", "a file system that is read only"]


@pytest.mark.sweep(rest=5)
@pytest.mark.parametrize(
    ("name", "launcher"),
    [*((name, "distopt run") for name in ENVIRONMENTS), *((name, "launch.main") for name in OF_MAIN)],
)
def test_ranks_start_and_meet(name, launcher):
    prefix = ENVIRONMENTS[name]
    if prefix[0] == "unshare":
        if not can_mount():
            pytest.skip("namespaces take privileges")
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip(f"this machine does not have: {name}")
    ended = Program([*prefix, *started(launcher, 2)]).end(code=0)
    assert sorted(ended.stdout.splitlines()) == SUMS


@pytest.mark.slow
@launchers
def test_a_script_behind_odd_paths(tmp_path, launcher):
    folder = tmp_path / "a folder, 'quoted' é\n"
    folder.mkdir()
    path = shutil.copy(LAUNCHED, folder / "my script.py")
    ended = Program([str(path) if word == LAUNCHED else word for word in started(launcher, 2)]).end(code=0)
    assert sorted(ended.stdout.splitlines()) == SUMS


# -- containers of ranks -----------------------------------------------------------------------------------------------
# Ranks in containers of their own, between which the kernel refuses what MPICH relies on: reads of other processes.
#
# As under `srun apptainer exec` without root: a user namespace for each rank; or a process namespace; or a filter of
# system calls.
SCRIPT = [sys.executable, LAUNCHED]
# Containers with process namespaces have an init. The kernel kills all of a namespace when its process 1 ends; if that
# were rank 0, the job's server would end before the other ranks have left.
INIT = str(ROOT / "tests" / "ranks" / "init_of_a_container.py")
CONTAINERS = {
    "user namespaces": ("unshare", "--user", "--map-root-user"),
    "process namespaces": ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, INIT),
    "a filter of system calls": (sys.executable, str(ROOT / "tests" / "ranks" / "without_process_vm.py")),
}
each_container = pytest.mark.parametrize("container", CONTAINERS)


@pytest.fixture
def memories(tmp_path, request) -> list[list[str]]:
    """For each of two hosts, the start of a command line with a /dev/shm of its own.

    MPICH may leave there what it likes. It names files after process ids, which are 1 in every process namespace.
    """
    container = request.getfixturevalue("container")
    if subprocess.run([*CONTAINERS[container], "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"this kernel, or this user, cannot make {container}")
    if is_open_mpi():
        pytest.skip("MPICH is absent: pip install mpi4py mpich")
    folders = [tmp_path / "shm-a", tmp_path / "shm-b"]
    for folder in folders:
        folder.mkdir()
    return [own_memory(folder) for folder in folders]


def transports(ended) -> list[str]:
    """Those of all ranks, in order."""
    lines = re.findall(r"rank (\d) of \d,.*: \w+ ([a-z]+) mpi", "".join(one.stdout for one in ended))
    assert [int(rank) for rank, _ in sorted(lines)] == list(range(len(lines)))
    return [transport for _, transport in sorted(lines)]


@each_container
@pytest.mark.parametrize("by_mpi", [True, False])
def test_ranks_of_one_host_share_memory_or_find_out_that_they_cannot(container, by_mpi, memories):
    command = [*memories[0], *mpiexec_command(2), *CONTAINERS[container], *SCRIPT, "ok"]
    ended = end_all([Program(command, SHORT | ({"DISTOPT_TRANSPORT": "mpi"} if by_mpi else {}))])
    other = "hierarchical" if container == "process namespaces" else "shm"
    assert transports(ended) == 2 * ["mpi" if by_mpi else other]
    # That MPICH has been kept from it costs a copy, and is said.
    assert not by_mpi or "MPIR_CVAR_CH4_CMA_ENABLE" in ended[0].stderr


@pytest.mark.slow(rest=1)
@each_container
def test_ranks_of_distopt_run_on_two_hosts(container, memories, net, script):
    words = [*CONTAINERS[container], *SCRIPT, "ok"]
    run = [*started_by("distopt run"), "--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29421"]
    run += [script(f"import os\nos.execvp({words[0]!r}, {words})\n")]
    pairs = zip(memories, net.hosts, strict=True)
    ended = end_all(Program(memory + host.inside(run), SHORT) for memory, host in pairs)
    assert transports(ended) == 4 * ["ucx" if container == "process namespaces" else "hierarchical"]


@pytest.mark.parametrize("container", ["process namespaces"])
@pytest.mark.parametrize("hosts", [["pod-0", "pod-1"], ["pod", "pod"]], ids=["two host names", "one host name"])
def test_ranks_that_are_process_1_by_variables(container, hosts, memories, port):
    """As in pods, or by `docker run`, without an init: rank 0 takes its container along at its end."""
    programs = []
    for rank, host in enumerate(hosts):
        command = ["unshare", "--uts", *CONTAINERS[container][:-2], "sh", "-c", f'hostname {host} && exec "$@"', "sh"]
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **SHORT}
        programs.append(Program([*memories[0], *command, *SCRIPT, "outlive"], variables))
    ended = end_all(programs)
    assert [one.stdout.split(",")[0] for one in ended] == ["rank 0 of 2", "rank 1 of 2"], ended
    assert ended[1].stdout.endswith("done\n")  # a second after rank 0 has left
