"""Jobs under mpiexec, on one host or on several: how they end, what they say, and that wrong launchers are found."""

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
from tests import processes
from tests.processes import ROOT, Ended, Program, end_all, mpiexec, mpiexec_codes, mpiexec_command, start_mpiexec

SCRIPT, HOSTS_SCRIPT = (str(ROOT / "tests" / "ranks" / f"{name}_script.py") for name in ("mpi", "hosts"))
SMALL_PARTS = "tests.conformance.ranks:SmallPartsCommunicator"
MPI_JOB, FAKE_HOSTS = "distopt.launch.job.mpi:MpiJob", "tests.conformance.ranks"
FEW = r"^[^-]*$|-float32(-sum)?$|-(int64|bfloat16|bool)-(max|product)$"
# Of ranks that believe to be on several hosts: all that is not inherited from the flat communicator, and one of each.
OF_HOSTS = "^(all_reduce-(float32-mean|float16-mean|bfloat16-sum|int64-max)|reduce_scatter-float32-sum|"
OF_HOSTS += "broadcast-float64|all_gather_ragged-float32|[^-]*)$"
FEW_OF_HOSTS = "^(all_reduce-(float32-mean|bfloat16-sum)|reduce_scatter-float32-sum|"
FEW_OF_HOSTS += "all_gather_ragged-float32|subgroups|shapes)$"
FAILED = r"^rank 1 on \S+ \(pid \d+\) failed:"


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("n", [2, 4])
def test_the_suite_passes_under_mpiexec(n):
    suite = str(ROOT / "tests" / "ranks" / "test_mpi.py")
    words = ["-m", "pytest", "-q", "-x", "--color=no", "-p", "no:cacheprovider", f"--rootdir={ROOT}", suite]
    (ended,) = end_all([start_mpiexec(n, *words)])
    assert ended.stdout.count(" passed in ") == n


@pytest.mark.slow(kept=2, rest=2)
@pytest.mark.parametrize(
    ("n", "transport", "order", "job", "checks"),
    [
        (2, "mpi", "auto", MPI_JOB, FEW),
        (4, "hierarchical", "auto", f"{FAKE_HOSTS}:blocks", FEW_OF_HOSTS),
        pytest.param(3, SMALL_PARTS, "auto", MPI_JOB, FEW, marks=pytest.mark.sweep(rest=99)),
        (4, SMALL_PARTS, "auto", f"{FAKE_HOSTS}:blocks", FEW_OF_HOSTS),
        *((n, transport, "auto", MPI_JOB, "") for n in (2, 1, 3, 4) for transport in ("mpi", "shm")),
        *(
            (4, transport, order, f"{FAKE_HOSTS}:{hosts}", OF_HOSTS)
            for transport, order in (("hierarchical", "auto"), ("hierarchical", "rank"), ("mpi", "auto"))
            for hosts in ("blocks", "round_robin")
        ),
    ],
)
def test_conformance_under_mpiexec(n, transport, order, job, checks):
    words = ("--transport", transport, "--job", job, "-k", checks)
    (ended,) = end_all([start_mpiexec(n, "-m", "tests.conformance.run", *words, env={"DISTOPT_SUM_ORDER": order})])
    assert ended.stdout.count(" checks passed") == n


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(("how", "code"), [("success", 0), ("sys.exit", 3), ("SIGKILL", None), ("SIGHUP", None)])
def test_the_exit_code_is_that_of_the_job(how, code):
    ended = mpiexec(2, SCRIPT, how)
    assert ended.code != 0 if code is None else ended.code in mpiexec_codes(code), ended.stderr
    assert "Traceback" not in ended.stderr
    assert "UCX" not in ended.stdout + ended.stderr
    if how == "success":
        assert sorted(ended.stdout.split("\n")[:2]) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("how", ["raise", pytest.param("huge", marks=pytest.mark.slow)])
def test_exception_in_one_rank_ends_the_job_and_is_shown_whole_unless_it_is_huge(how):
    ended = mpiexec(2, SCRIPT, how)
    assert ended.code in mpiexec_codes(1)
    assert re.search(rf"{FAILED}\nTraceback \(most recent call last\):\n", ended.stderr, re.M)
    if how == "huge":
        assert "characters are left out" in ended.stderr
        assert "the end of the text" in ended.stderr
        assert len(ended.stderr) < 200_000
    else:
        lines = ended.stderr.splitlines()
        assert 'raise ValueError("the cause")' in lines[lines.index("Traceback (most recent call last):") + 2]
        assert lines[-1] == "ValueError: the cause" or processes.is_open_mpi()  # whose mpiexec adds a paragraph
        assert ended.stderr.count("Traceback") == 1


FINALIZED = {
    # Because of an exception, which leaves no other rank waiting.
    "finalize": [rf"{FAILED}\nTraceback", "^ValueError: the cause$", "^.*CommunicatorClosedError: rank"],
    "use": [r"ClosedError: rank [01] \(host "],
    "make": ["LaunchError: rank [01] on .*called MPI_Finalize"],
}


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(
    ("how", "transport"), [("finalize", "shm"), ("use", "mpi"), ("finalize", "mpi"), ("use", "shm"), ("make", "shm")]
)
def test_what_follows_mpi_finalize_is_refused(how, transport):
    ended = mpiexec(2, SCRIPT, how, transport, env={"DISTOPT_TIMEOUT": "1000"})  # longer than a test waits
    assert ended.code != 0
    for said in FINALIZED[how]:
        assert re.search(said, ended.stderr, re.M), ended.stderr


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


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(("how", "code"), [("return", 0), ("sys.exit", 3), ("raise", 1)])
@pytest.mark.parametrize(("processes", "mark"), [("0", ""), ("2", "[rank 1] ")], ids=["mpiexec", "launch.main"])
def test_forked_child_does_not_act_for_its_rank(processes, mark, how, code):
    command = [sys.executable, str(ROOT / "tests" / "ranks" / "fork_script.py"), processes, how]
    (ended,) = end_all([Program(command if mark else [*mpiexec_command(2), *command])])
    assert {*ended.stdout.splitlines()} == {"rank 0 has ended well", f"{mark}rank 1 has ended well"}
    assert f"the child ended with {code}\n" in ended.stderr
    assert ("ValueError: of the child" in ended.stderr) == (how == "raise")


OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4"}


@pytest.mark.parametrize(("env", "named"), [(OMPI, "mpiexec of Open MPI"), (PMI, "mpiexec of MPICH or Intel MPI")])
def test_ranks_that_all_believe_to_be_rank_0_of_1(env, named, monkeypatch):
    pytest.importorskip("mpi4py.MPI", reason="mpi4py is absent: pip install mpi4py mpich", exc_type=ImportError)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    said = rf"(?s){named} started this process as rank 1 of 4.*library in use \(.*MPI"
    with pytest.raises(LaunchError, match=said) as caught:
        launch.join()
    assert "sees rank 0 of 1" in str(caught.value)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
MPI_JOB_ALONE = ["-c", "from distopt import launch; launch.MpiJob()"]


@pytest.mark.parametrize(
    ("env", "words", "why"),
    [
        (TORCHRUN, MPI_JOB_ALONE, "cannot connect ranks that torchrun started"),
        (OMPI, [SCRIPT, "success"], "cannot be started by it"),
        (PMI | {"MPI_LOCALRANKID": "1"}, [SCRIPT, "success"], "cannot be started by it"),
    ],
)
def test_a_launcher_that_is_not_that_of_the_mpi_in_use_is_refused_before_it_aborts(env, words, why):
    if env is not TORCHRUN and (env is OMPI) == processes.is_open_mpi():
        pytest.skip("this is the launcher of the MPI in use")
    ended = Program([sys.executable, *words], env).end()
    assert ended.code != 0
    assert "started this process as rank 1 of 4" in ended.stderr
    assert f"{why}; start the job with the mpiexec of that library" in ended.stderr.splitlines()[-1]


def test_joins_without_mpi4py_and_limits_of_mpi_init(monkeypatch):
    stopped = []
    watchdog = SimpleNamespace(stop=lambda: stopped.append(True))
    monkeypatch.setattr(mpi, "_core", SimpleNamespace(Watchdog=lambda *_: watchdog))
    with mpi._bounded_init(launch.LauncherInfo("mpiexec", 0, 2, 0, 2, "")):
        assert not stopped
    assert stopped
    monkeypatch.setattr("distopt.launch.find_spec", lambda name: None)
    job = launch.join()
    assert (job.topology.rank, job.topology.world_size) == (0, 1)
    assert job.all_gather(b"x") == [b"x"]
    job.close()


def test_mpiexec_without_mpi4py_says_how_to_install_it(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(MissingDependencyError, match=r"PMI_SIZE=2.*; pip install mpi4py mpich$"):
        launch.join()


def leave(n: int, transport: str, how: str, where: str, seconds: float = 1000.0) -> Ended:
    """`seconds`: how long the others continue, longer than a test waits if they must be ended."""
    env = {"DISTOPT_TRANSPORT": transport, "DISTOPT_TIMEOUT": "120"}
    return mpiexec(n, str(ROOT / "tests" / "ranks" / "early_exit_script.py"), how, where, str(seconds), env=env)


@pytest.mark.slow(kept=1, rest=3)
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
    assert set(re.findall(r"rank (\d) on \S+ \(pid \d+\) (?:left|has ended)", ended.stderr)) == {str(n - 1)}


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("n", "transport"), [(2, "shm"), (3, "mpi")])
def test_rank_that_nothing_in_it_can_hold_is_named_by_another_process(n, transport):
    ended = leave(n, transport, "_exit of C", "after the last step")  # the code is mpiexec's
    pid = ended.stdout.split()[0]
    named = re.findall(r"^rank (\d) on \S+ \(pid (\d+)\) has ended before the others", ended.stderr, re.M)
    assert named == [(str(n - 1), pid)], ended.stderr


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize(
    ("how", "where"),
    [
        *(("os._exit", where) for where in ("after close", "after close, finalized")),
        *(("return", where) for where in ("after close", "after the last step", "after close, finalized", "finalized")),
    ],
)
@pytest.mark.parametrize(("n", "transport"), [(2, "mpi"), (3, "shm")])
def test_rank_that_leaves_as_it_should_is_not_accused(n, transport, how, where):
    ended = leave(n, transport, how, where, 0.5)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("done") == n - 1
    assert not ended.stderr


# -- ranks on several hosts, or that believe to be --------------------------------------------------------------------
def told(stdout: str) -> list[tuple[str, str]]:
    """Every rank's line: the transport, and the rest."""
    return re.findall(r"^rank \d on \S+ over (\w+): (.*)$", stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "transport"), [("aabb", "hierarchical"), ("abba", "hierarchical"), ("aab", "mpi"), ("abc", "mpi")]
)
def test_transport_suits_the_hosts_and_has_the_same_bits_everywhere(hosts, transport):
    (ended,) = end_all([start_mpiexec(len(hosts), HOSTS_SCRIPT, "check", hosts)])
    assert "leaked" not in ended.stderr, "nanobind says so of objects that outlive the interpreter"
    ranks = told(ended.stdout)
    assert ranks == [(transport, ranks[0][1])] * len(hosts)
    assert ("the hosts have 1 or 2 ranks: all communication goes through MPI" in ended.stderr) == (hosts == "aab")


def test_ranks_that_differ_in_number_or_order_are_refused():
    ended = mpiexec(3, HOSTS_SCRIPT, "check", "aab", env={"DISTOPT_TRANSPORT": "hierarchical"})
    assert ended.code == 2
    assert "needs as many ranks on every host, not 2 on host-a, 1 on host-b; choose mpi" in ended.stderr
    rank = "OMPI_COMM_WORLD_RANK" if processes.is_open_mpi() else "PMI_RANK"
    order = f"os.environ['DISTOPT_SUM_ORDER'] = ('auto', 'rank')[int(os.environ['{rank}'])]"
    ended = mpiexec(2, "-c", f"import os; {order}; import distopt; distopt.init()")
    assert ended.code != 0
    assert "the ranks differ in DISTOPT_SUM_ORDER: auto on rank 0" in ended.stderr
    assert "rank on rank 1" in ended.stderr


IN = r"rank \d \(host host-[ab], "
FAILURES = {
    "mismatch": rf"MismatchError {IN}.* in all_reduce #\d+ of 100,000 float32",
    # On the other host, a rank may only see that those which have found the mismatch do not answer.
    "op": rf"MismatchError {IN}.* all_reduce #\d+\b.*, rank \d .* all_reduce #\d+\b"
    rf"|StalledError no answer within [\d.]+ s: {IN}.* in all_reduce #\d+ of 2,000,000",
    "close": rf"CommunicatorClosedError {IN}.* but rank 3 \(host host-b, .* has closed the communicator",
    "late": rf"StalledError no answer within TIMEOUT s: {IN}.* for rank 3 \(host host-b, .* raise DISTOPT_TIMEOUT",
}


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("hosts", "transport"), [("abab", "hierarchical"), ("aabb", "mpi")])
@pytest.mark.parametrize("how", FAILURES)
def test_failures_name_ranks_and_hosts(how, hosts, transport):
    timeout = f"{processes.patience(1.5) if how in {'op', 'late'} else 120:.0f}"
    env = {"DISTOPT_TIMEOUT": timeout, "DISTOPT_TRANSPORT": transport}
    (ended,) = end_all([start_mpiexec(4, HOSTS_SCRIPT, how, hosts, env=env)])
    ranks = told(ended.stdout)
    assert [name for name, _ in ranks] == [transport] * 4
    for _, text in ranks:
        assert not text or re.search(FAILURES[how].replace("TIMEOUT s:", f"{timeout} s:"), text), text
    assert sum(bool(text) for _, text in ranks) >= 3
    if how in {"mismatch", "op"}:
        assert sum(text.startswith("MismatchError") for _, text in ranks) >= 2


@pytest.mark.slow
def test_sum_is_that_of_the_flat_communicator_and_has_the_same_bits_everywhere(net):
    (ended,) = end_all([Program(net.mpiexec(2, [sys.executable, HOSTS_SCRIPT, "check"]))])
    assert "was not matched" not in ended.stdout, "UCX warns of messages that nobody has received"
    told = re.findall(r"^rank (\d) on (\S+) over (\w+): (\w+)$", ended.stdout, re.MULTILINE)
    first, second = (host.name for host in net.hosts)
    assert sorted((rank, host) for rank, host, *_ in told) == [("0", first), ("1", first), ("2", second), ("3", second)]
    assert {transport for _, _, transport, _ in told} == {"hierarchical"}
    assert len({digest for *_, digest in told}) == 1
