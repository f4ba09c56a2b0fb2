"""Jobs under mpiexec: how they end, what they say, and that wrong launchers are found."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from distopt import launch
from distopt.errors import LaunchError, MissingDependencyError
from distopt.launch.rendezvous import mpi
from tests.processes import ROOT, Ended, Program, mpiexec, mpiexec_codes, mpiexec_command, start_mpiexec

SCRIPT = str(ROOT / "tests" / "ranks" / "mpi_script.py")
SMALL_PARTS = "tests.conformance.small_parts:SmallPartsCommunicator"
FEW = r"^[^-]*$|-float32(-sum)?$|-(int64|bfloat16|bool)-(max|product)$"


def library() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version()


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("n", [2, 4])
def test_the_suite_passes_under_mpiexec(n):
    suite = str(ROOT / "tests" / "ranks" / "test_mpi.py")
    words = ["-m", "pytest", "-q", "-x", "--color=no", "-p", "no:cacheprovider", f"--rootdir={ROOT}", suite]
    ended = mpiexec(n, *words)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(" passed in ") == n


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize(
    ("n", "transport", "checks"),
    [
        (2, "mpi", FEW),
        pytest.param(3, SMALL_PARTS, FEW, marks=pytest.mark.sweep(rest=99)),
        *((n, transport, "") for n in (2, 1, 3, 4) for transport in ("mpi", "shm")),
    ],
)
def test_conformance_under_mpiexec(n, transport, checks):
    words = ("--transport", transport, "--job", "distopt.launch.job.mpi:MpiJob", "-k", checks)
    ended = mpiexec(n, "-m", "tests.conformance.run", *words)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(" checks passed") == n


@pytest.mark.parametrize(("how", "code"), [("success", 0), ("sys.exit", 3), ("SIGKILL", None)])
def test_the_exit_code_is_that_of_the_job(how, code):
    ended = mpiexec(2, SCRIPT, how)
    assert ended.code != 0 if code is None else ended.code in mpiexec_codes(code), ended.stderr
    assert "Traceback" not in ended.stderr
    if how == "success":
        assert sorted(ended.stdout.split("\n")[:2]) == ["rank 0 of 2", "rank 1 of 2"]


def test_exception_in_one_rank_ends_the_job_and_is_shown_whole():
    ended = mpiexec(2, SCRIPT, "raise")
    assert ended.code in mpiexec_codes(1)
    lines = ended.stderr.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert lines[start - 1].startswith("rank 1 on ")
    assert lines[start - 1].endswith(" failed:")
    assert 'raise ValueError("the cause")' in lines[start + 2]
    assert lines[-1] == "ValueError: the cause" or "Open MPI" in library()  # whose mpiexec adds a paragraph
    assert ended.stderr.count("Traceback") == 1


# -- a script that calls MPI_Finalize itself ---------------------------------------------------------------------------
@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_a_rank_that_finalizes_because_of_an_exception_leaves_no_other_waiting(transport):
    ended = mpiexec(2, SCRIPT, "finalize", transport, env={"DISTOPT_TIMEOUT": "1000"})  # longer than a test waits
    assert ended.code != 0
    assert re.search(r"^rank 1 on \S+ \(pid \d+\) failed:\nTraceback", ended.stderr, re.M), ended.stderr
    assert "\nValueError: the cause\n" in ended.stderr
    assert "CommunicatorClosedError: rank" in ended.stderr


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("how", "transport", "text"),
    [
        ("use", "shm", "ClosedError: rank {} (host "),
        ("use", "mpi", "ClosedError: rank {} (host "),
        ("make", "shm", "LaunchError: rank {} on "),
    ],
)
def test_what_follows_mpi_finalize_is_refused(how, transport, text):
    ended = mpiexec(2, SCRIPT, how, transport)
    assert ended.code != 0
    assert any(text.format(rank) in ended.stderr for rank in (0, 1)), ended.stderr
    if how == "make":
        assert "called MPI_Finalize" in ended.stderr


@pytest.mark.slow
def test_killed_rank_is_noticed_even_if_mpiexec_is_not_awake(tmp_path):
    log = tmp_path / "stderr"  # mpiexec drops what it has not read when a rank aborts
    through_shell = ["sh", "-c", f'exec "$0" "$@" 2>>"{log}"', sys.executable, SCRIPT, "wait"]
    program = Program([*mpiexec_command(3), *through_shell])
    program.read_lines(3)
    running = program.pids()
    ranks = sorted(pid for pid, command in running.items() if re.match(r"\S*python\S* \S*mpi_script", command))
    assert len(ranks) == 3, running
    supervisors = running.keys() - ranks
    try:
        for pid in supervisors:
            os.kill(pid, signal.SIGSTOP)
        os.kill(ranks[2], signal.SIGKILL)
        while not all(has_ended(pid) for pid in ranks):
            time.sleep(0.02)
    finally:
        for pid in supervisors:
            os.kill(pid, signal.SIGCONT)
    assert program.end().code != 0
    name = r"rank {} \(host \S+, pid {}\)".format
    lost = f"PeerLostError: {name(2, ranks[2])} ended while {name('[01]', '[0-9]+')} waits in barrier"
    assert re.search(lost, log.read_text()), log.read_text()


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or waits for a parent that is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("how", "code"), [("return", 0), ("sys.exit", 3), ("raise", 1)])
def test_forked_child_does_not_act_for_its_rank(how, code):
    ended = mpiexec(2, str(ROOT / "tests" / "ranks" / "fork_script.py"), "0", how)
    assert ended.code == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 has ended well", "rank 1 has ended well"]
    assert f"the child ended with {code}\n" in ended.stderr
    assert ("ValueError: of the child" in ended.stderr) == (how == "raise")


def test_rank_that_gets_sighup_ends_with_its_job():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which the ranks inherit
    try:
        ended = mpiexec(2, SCRIPT, "SIGHUP")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.code != 0
    assert "UCX" not in ended.stdout + ended.stderr


@pytest.mark.slow
def test_huge_exception_is_cut_and_ends_the_job():
    ended = mpiexec(2, SCRIPT, "huge")
    assert ended.code in mpiexec_codes(1)
    assert re.search(r"rank 1 on \S+ \(pid \d+\) failed:\nTraceback", ended.stderr)
    assert "characters are left out" in ended.stderr
    assert "the end of the text" in ended.stderr
    assert len(ended.stderr) < 200_000


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_mpiexec_ends_all(signum):
    program = start_mpiexec(2, SCRIPT, "wait")
    program.read_lines(2)
    program.process.send_signal(signum)
    assert program.end().code != 0


# -- wrong launchers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "mpiexec of Open MPI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "mpiexec of MPICH or Intel MPI"),
    ],
)
def test_ranks_that_all_believe_to_be_rank_0_of_1(env, named, monkeypatch):
    pytest.importorskip("mpi4py.MPI", reason="mpi4py is absent: pip install mpi4py mpich", exc_type=ImportError)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        launch.join()
    message = str(caught.value)
    assert f"{named} started this process as rank 1 of 4" in message
    assert "sees rank 0 of 1" in message
    assert "MPI" in message.split("library in use (")[1]


def test_ranks_of_torchrun_cannot_be_those_of_mpi():
    env = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    ended = Program([sys.executable, "-c", "from distopt import launch; launch.MpiJob()"], env).end()
    assert "torchrun started this process as rank 1 of 4" in ended.stderr
    assert "cannot connect ranks that torchrun started; start the job with the mpiexec of that" in ended.stderr


@pytest.mark.parametrize(
    "env",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"},
    ],
)
def test_mpiexec_of_the_other_mpi_is_refused_before_it_aborts(env):
    if ("OMPI_COMM_WORLD_RANK" in env) == ("Open MPI" in library()):
        pytest.skip("this is the launcher of the MPI in use")
    ended = Program([sys.executable, SCRIPT, "success"], env).end()
    assert ended.code != 0
    assert "started this process as rank 1 of 4" in ended.stderr
    assert "cannot be started by it; start the job with the mpiexec of that library" in ended.stderr.splitlines()[-1]


def test_the_limit_of_mpi_init_ends_with_it(monkeypatch):
    stopped = []
    watchdog = SimpleNamespace(stop=lambda: stopped.append(True))
    monkeypatch.setattr(mpi, "_core", SimpleNamespace(Watchdog=lambda *_: watchdog))
    with mpi._bounded_init(launch.LauncherInfo("mpiexec", 0, 2, 0, 2, "")):
        assert not stopped
    assert stopped


@pytest.fixture
def without_mpi4py(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mpi4py", None)


def test_mpiexec_without_mpi4py_says_how_to_install_it(without_mpi4py, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(MissingDependencyError, match=r"PMI_SIZE=2.*; pip install mpi4py mpich$"):
        launch.join()


def test_join_without_mpi4py_and_without_launcher_is_a_job_of_one(monkeypatch):
    monkeypatch.setattr("distopt.launch.find_spec", lambda name: None)
    job = launch.join()
    assert (job.topology.rank, job.topology.world_size) == (0, 1)
    assert job.all_gather(b"x") == [b"x"]
    job.close()


# -- a rank that ends with code 0 while others are at work -------------------------------------------------------------
EARLY_EXIT = str(ROOT / "tests" / "ranks" / "early_exit_script.py")


def leave(n: int, transport: str, how: str, where: str, seconds: float = 1000.0) -> Ended:
    """`seconds`: how long the others continue, longer than a test waits if they must be ended."""
    return mpiexec(
        n, EARLY_EXIT, how, where, str(seconds), env={"DISTOPT_TRANSPORT": transport, "DISTOPT_TIMEOUT": "120"}
    )


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=3)
@pytest.mark.parametrize("how", ["os._exit", "exit of C"])
@pytest.mark.parametrize("where", ["between steps", "after the last step"])
@pytest.mark.parametrize(("n", "transport"), [(2, "shm"), (3, "shm"), (2, "mpi"), (3, "mpi")])
def test_rank_that_leaves_with_0_before_the_others(n, transport, where, how):
    ended = leave(n, transport, how, where)
    pid = ended.stdout.split()[0]
    assert ended.code != 0
    assert "done" not in ended.stdout
    name = {"os._exit": r"os\._exit\(0\)", "exit of C": r"exit\(0\) of C"}[how]
    assert re.search(rf"^rank {n - 1} on \S+ \(pid {pid}\) left by {name} before", ended.stderr, re.M), ended.stderr
    others = set(re.findall(r"rank (\d) on \S+ \(pid \d+\) (?:left|has ended)", ended.stderr))
    assert others == {str(n - 1)}


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("n", "transport"), [(2, "shm"), (3, "mpi")])
def test_rank_that_nothing_in_it_can_hold_is_named_by_another_process(n, transport):
    ended = leave(n, transport, "_exit of C", "after the last step")  # the code is mpiexec's
    pid = ended.stdout.split()[0]
    named = re.findall(r"^rank (\d) on \S+ \(pid (\d+)\) has ended before the others", ended.stderr, re.M)
    assert named == [(str(n - 1), pid)], ended.stderr


@pytest.mark.slow
@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("os._exit", "after close"),
        ("return", "after close"),
        ("return", "after the last step"),
        ("os._exit", "after close, finalized"),
        ("return", "after close, finalized"),
        ("return", "finalized"),
    ],
)
@pytest.mark.parametrize(("n", "transport"), [(2, "mpi"), (3, "shm")])
def test_rank_that_leaves_as_it_should_is_not_accused(n, transport, how, where):
    ended = leave(n, transport, how, where, 0.5)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("done") == n - 1
    assert not ended.stderr
