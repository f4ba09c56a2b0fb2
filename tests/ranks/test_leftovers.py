"""A job that fails leaves nothing behind: no files of MPICH, no processes that ranks have started."""

import signal
import sys
import time

import pytest

from instruments.faults.ways import can_mount, own_memory
from tests.conformance.ranks import needs_ucx
from tests.processes import LAUNCHED, RUN, Program, is_open_mpi, mpiexec_command, started_by
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
TWO = [*RUN, "--nproc-per-node", "2"]

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

if os.environ["PMI_RANK"] == "1":
    while not called.exists():
        time.sleep(0.01)
    time.sleep(1)
    os._exit(3)
MPI.Init_thread = tell_and_init
launch.main(launch.join)
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


@needs_ucx
@pytest.mark.parametrize("launcher", ["srun", "distopt run"])
def test_hosts_that_the_chosen_interface_does_not_connect_end_and_leave_no_file(net, memory, launcher):
    """The loopback, which each host has for itself."""
    env, address = {"GLOO_SOCKET_IFNAME": "lo", "DISTOPT_TIMEOUT": "20"}, net.hosts[0].address
    if launcher == "srun":
        places = [(host, {"SLURM_LOCALID": str(local)}) for host in net.hosts for local in range(2)]
        places = [(host, slurm(rank, 4, address, 2) | own) for rank, (host, own) in enumerate(places)]
        command = [sys.executable, LAUNCHED, "ok"]
    else:
        places = [(host, {}) for host in net.hosts]
        command = [*TWO, "--nnodes", "2", "--rdzv-endpoint", f"{address}:29431", LAUNCHED, "ok"]
    programs = [Program(own_memory(memory) + host.inside(command), env | own) for host, own in places]
    ended = [program.end() for program in programs]
    assert all(one.code != 0 for one in ended), ended
    assert "name a network interface" in "".join(one.stderr for one in ended)
    assert [path.name for path in memory.iterdir()] == []


@pytest.mark.slow
def test_no_file_remains_of_an_mpi_init_that_misses_a_rank(memory, script):
    ended = Program([*own_memory(memory), *mpiexec_command(2), sys.executable, script(EARLY_END)]).end()
    assert ended.code != 0
    assert "waits in MPI_Init, and a process of this job" in ended.stderr
    assert [path.name for path in memory.iterdir()] == []


@pytest.mark.parametrize(
    ("launcher", "signum", "code"),
    [
        ("distopt run", signal.SIGTERM, 143),
        ("distopt run", signal.SIGINT, 130),
        *((launcher, signal.SIGKILL, -9) for launcher in ("launch.main", "distopt run")),
    ],
)
def test_processes_that_ranks_have_started_end_with_the_launcher(script, launcher, signum, code):
    program = Program(started_by(launcher, script(PARENTS), *["main"] * (launcher == "launch.main"))).ready()
    # A process in the middle of exec shows neither its words nor its mark.
    while [*program.pids().values()].count("sleep 1000 ") < 2:
        time.sleep(0.02)
    program.process.send_signal(signum)
    program.assert_nothing_left()  # before the end of the output, which they hold open
    program.end(code=code)


@pytest.mark.parametrize("launcher", ["launch.main", "distopt run", "mpiexec"])
def test_a_world_that_is_never_closed_leaves_no_socket_open(script, launcher):
    ended = Program(started_by(launcher, script(WORLD), launcher), {"PYTHONDEVMODE": "1"}).end(code=0)
    assert ended.stdout.count("2\n") == 2
    assert "ResourceWarning" not in ended.stderr
