"""A job that fails leaves nothing behind: no files of MPICH, no processes that ranks have started."""

import os
import signal
import sys
import time

import pytest

from tests.conformance.ranks import needs_ucx
from tests.faults.ways import can_mount, own_memory
from tests.processes import ROOT, Program, is_open_mpi, mpiexec_command
from tests.ranks.test_launchers import slurm

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

WORLD = """
import sys
import distopt
from distopt import launch

def work(*_):
    sys.stdout.write(f"{distopt.init().all_reduce(1)}\\n")

if __name__ == "__main__":
    launch.main(work, 2) if sys.argv[1] == "launch.main" else work()
"""
SCRIPT = str(ROOT / "tests" / "ranks" / "large_sums_script.py")
RUN = [sys.executable, "-m", "distopt", "run"]

# Rank 1 ends a second after rank 0 has called MPI_Init.
EARLY_END = """
import os, pathlib, time
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
from distopt import launch

called, init = pathlib.Path(__file__ + "-called"), MPI.Init_thread

def tell_and_init(*args):
    called.touch()
    init(*args)

def main():
    launch.join()

if os.environ["PMI_RANK"] == "1":
    while not called.exists():
        time.sleep(0.01)
    time.sleep(1)
    os._exit(3)
MPI.Init_thread = tell_and_init
launch.main(main)
"""

# Each rank starts a program, says so, and waits.
PARENTS = """
import subprocess, sys, time
from distopt import launch

def train(rank=0, n=0):
    subprocess.Popen(["sleep", "1000"])
    print("started", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    launch.main(train, 2) if len(sys.argv) > 1 else train()
"""


@pytest.fixture
def memory(tmp_path):
    """A folder that becomes /dev/shm."""
    if not can_mount():
        pytest.skip("mounting a /dev/shm takes privileges")
    if is_open_mpi():
        pytest.skip("MPICH is absent: pip install mpi4py mpich")
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def on_two_hosts(net, memory, launcher, per_host, words, env):
    """Run a script on two hosts to its end."""
    programs = []
    if launcher == "srun":
        for rank in range(2 * per_host):
            numbers = {**slurm(rank, 2 * per_host, net.hosts[0].address, 2), "SLURM_LOCALID": str(rank % per_host)}
            command = net.hosts[rank // per_host].inside([sys.executable, *words])
            programs.append(Program(own_memory(memory) + command, {**env, **numbers}))
    else:
        meet = ["--nnodes", "2", "--nproc-per-node", str(per_host), "--rdzv-endpoint", f"{net.hosts[0].address}:29431"]
        programs = [Program(own_memory(memory) + host.inside([*RUN, *meet, *words]), env) for host in net.hosts]
    return [program.end() for program in programs]


@needs_ucx
@pytest.mark.parametrize("launcher", ["srun", "distopt run"])
def test_hosts_that_the_chosen_interface_does_not_connect_end_and_leave_no_file(net, memory, launcher):
    """The loopback, which each host has for itself."""
    env = {"GLOO_SOCKET_IFNAME": "lo", "DISTOPT_TIMEOUT": "20"}
    ended = on_two_hosts(net, memory, launcher, 2, [SCRIPT], env)
    assert all(one.code != 0 for one in ended), ended
    assert "name a network interface" in "".join(one.stderr for one in ended)
    assert [path.name for path in memory.iterdir()] == []


@pytest.mark.slow
def test_no_file_remains_of_an_mpi_init_that_misses_a_rank(memory, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(EARLY_END)
    ended = Program([*own_memory(memory), *mpiexec_command(2), sys.executable, str(script)]).end()
    assert ended.code != 0
    assert "waits in MPI_Init, and a process of this job" in ended.stderr
    assert [path.name for path in memory.iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["launch.main", "distopt run"])
def test_processes_that_ranks_have_started_end_with_a_killed_launcher(tmp_path, launcher):
    script = tmp_path / "script.py"
    script.write_text(PARENTS)
    run = [*RUN, "--nproc-per-node", "2", str(script)]
    program = Program(run if launcher == "distopt run" else [sys.executable, str(script), "main"])
    program.read_lines(2)
    # A process in the middle of exec shows neither its words nor its mark.
    while [*program.pids().values()].count("sleep 1000 ") < 2:
        time.sleep(0.02)
    os.kill(program.process.pid, signal.SIGKILL)
    program.assert_nothing_left()  # before the end of the output, which they hold open
    assert program.end().code == -signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_processes_that_ranks_have_started_end_with_the_job(tmp_path, signum):
    script = tmp_path / "script.py"
    script.write_text(PARENTS)
    program = Program([*RUN, "--nproc-per-node", "2", str(script)])
    program.read_lines(2)
    program.process.send_signal(signum)
    assert program.end().code == 128 + signum


@pytest.mark.parametrize("launcher", ["launch.main", "distopt run", "mpiexec"])
def test_a_world_that_is_never_closed_leaves_no_socket_open(tmp_path, launcher):
    script = tmp_path / "script.py"
    script.write_text(WORLD)
    command = [sys.executable]
    if launcher == "mpiexec":
        command = [*mpiexec_command(2), *command]
    elif launcher == "distopt run":
        command = [*RUN, "--nproc-per-node", "2"]
    ended = Program([*command, str(script), launcher], {"PYTHONDEVMODE": "1"}).end()
    assert ended.code == 0, ended
    assert ended.stdout.count("2\n") == 2
    assert "ResourceWarning" not in ended.stderr
