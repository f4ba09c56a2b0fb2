"""Ranks in containers of their own, between which the kernel refuses what MPICH relies on: reads of other processes.

As under `srun apptainer exec` without root: a user namespace for each rank; or a process namespace; or a filter of
system calls.
"""

import functools
import re
import subprocess
import sys

import pytest

from tests.faults.ways import own_memory
from tests.processes import ROOT, Ended, Program, free_port, is_open_mpi, mpiexec_command

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

SCRIPT = str(ROOT / "tests" / "ranks" / "large_sums_script.py")
# Containers with process namespaces have an init. The kernel kills all of a namespace when its process 1 ends; if that
# were rank 0, the job's server would end before the other ranks have left.
INIT = str(ROOT / "tests" / "ranks" / "init_of_a_container.py")
CONTAINERS = {
    "user namespaces": ("unshare", "--user", "--map-root-user"),
    "process namespaces": ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, INIT),
    "a filter of system calls": (sys.executable, str(ROOT / "tests" / "ranks" / "without_process_vm.py")),
}
each_container = pytest.mark.parametrize("container", CONTAINERS)


@functools.cache
def can_contain(container: str) -> bool:
    done = subprocess.run([*CONTAINERS[container], "true"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture(autouse=True)
def available(request):
    if (container := request.getfixturevalue("container")) and not can_contain(container):
        pytest.skip(f"this kernel, or this user, cannot make {container}")
    if is_open_mpi():
        pytest.skip("MPICH is absent: pip install mpi4py mpich")


@pytest.fixture
def memories(tmp_path) -> list[list[str]]:
    """For each of two hosts, the start of a command line with a /dev/shm of its own.

    MPICH may leave there what it likes. It names files after process ids, which are 1 in every process namespace.
    """
    folders = [tmp_path / "shm-a", tmp_path / "shm-b"]
    for folder in folders:
        folder.mkdir()
    return [own_memory(folder) for folder in folders]


@pytest.fixture
def memory(memories) -> list[str]:
    """For one host."""
    return memories[0]


def assert_sums(ended: list[Ended], size: int, name: str) -> None:
    assert [one.code for one in ended] == [0] * len(ended), ended
    said = sorted(line for one in ended for line in re.findall(r"rank \d of \d: [a-z]+", one.stdout))
    assert said == [f"rank {rank} of {size}: {name}" for rank in range(size)]


def assert_said(ended: list[Ended]) -> None:
    """That MPICH has been kept from it: it costs a copy."""
    assert any("MPIR_CVAR_CH4_CMA_ENABLE" in one.stderr for one in ended), ended


@each_container
def test_large_sums_by_mpi_on_one_host(container, memory):
    command = [*mpiexec_command(2), *CONTAINERS[container], sys.executable, SCRIPT]
    ended = [Program(memory + command, {"DISTOPT_TRANSPORT": "mpi", "DISTOPT_TIMEOUT": "60"}).end()]
    assert_sums(ended, 2, "mpi")
    assert_said(ended)


@each_container
def test_ranks_of_one_host_share_memory_or_find_out_that_they_cannot(container, memory):
    command = [*mpiexec_command(2), *CONTAINERS[container], sys.executable, SCRIPT]
    ended = [Program(memory + command, {"DISTOPT_TIMEOUT": "60"}).end()]
    assert_sums(ended, 2, "hierarchical" if container == "process namespaces" else "shm")


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@each_container
def test_ranks_of_distopt_run_on_two_hosts(container, memories, net, tmp_path):
    script = tmp_path / "contained.py"
    script.write_text(
        f"import os\nos.execvp({CONTAINERS[container][0]!r}, {[*CONTAINERS[container], sys.executable, SCRIPT]})\n"
    )
    run = [sys.executable, "-m", "distopt", "run", "--nnodes", "2", "--nproc-per-node", "2"]
    run += ["--rdzv-endpoint", f"{net.hosts[0].address}:29421", str(script)]
    ended = [
        program.end()
        for program in [
            Program(memory + host.inside(run), {"DISTOPT_TIMEOUT": "60"})
            for memory, host in zip(memories, net.hosts, strict=True)
        ]
    ]
    assert_sums(ended, 4, "ucx" if container == "process namespaces" else "hierarchical")


@pytest.mark.parametrize("container", ["process namespaces"])
@pytest.mark.parametrize("hosts", [["pod-0", "pod-1"], ["pod", "pod"]], ids=["two host names", "one host name"])
def test_ranks_that_are_process_1_by_variables(container, hosts, memory):
    """As in pods, or by `docker run`, without an init: rank 0 takes its container along at its end."""
    port = free_port()
    programs = []
    for rank, host in enumerate(hosts):
        command = ["unshare", "--uts", *CONTAINERS[container][:-2], "sh", "-c", f'hostname {host} && exec "$@"', "sh"]
        script = [sys.executable, str(ROOT / "tests" / "ranks" / "launched_script.py"), "outlive"]
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DISTOPT_TIMEOUT": "60"}
        programs.append(Program(memory + command + script, variables))
    ended = [program.end() for program in programs]
    assert [one.code for one in ended] == [0, 0], ended
    assert [one.stdout.split(",")[0] for one in ended] == ["rank 0 of 2", "rank 1 of 2"], ended
    assert ended[1].stdout.endswith("done\n")  # a second after rank 0 has left
