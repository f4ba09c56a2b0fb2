"""`distopt doctor`: the rows, the exit code, and that no probe can bring it down."""

import io
import os
import re
import subprocess
import sys
import types
from fnmatch import fnmatchcase
from functools import partial
from unittest.mock import Mock

import pytest

from distopt import cli
from distopt.cli import doctor
from distopt.cli.doctor import gpu, host, hosts, mpi
from distopt.cli.doctor.ask import Ended, ask, run_bounded, unlaunched_environment
from distopt.cli.doctor.report import Probe, Style, absent, examine, failed, ok
from distopt.errors import DistoptError, UsageError
from tests.unit.refusals import refused


@pytest.fixture
def answer(monkeypatch):
    """Fake the child processes: set what each question is answered with."""
    given = {}

    def fake(question, *arguments, **options):
        found = given[question]
        if isinstance(found, Exception):
            raise found
        return found(*arguments, **options) if callable(found) else found

    for module in (host, hosts, mpi, gpu):
        monkeypatch.setattr(module, "ask", fake)
    return given


def check(finding, state, found, cure=""):
    assert finding.state == state
    assert found in finding.found
    assert cure in finding.cure


GOOD = Probe("good", lambda: ok("here"), needed=True)
ABSENT = Probe("extra", lambda: absent("not here", "get it"))
BROKEN = Probe("broken", lambda: failed("bent", "straighten it"))


# -- rows, table, exit code --------------------------------------------------------------------------------------
@pytest.mark.parametrize("finding", [failed("bent", "straighten it"), absent("gone", "fetch it")])
def test_a_needed_part_alone_changes_the_exit_code(finding, capsys):
    assert doctor.run(None, (GOOD, ABSENT, BROKEN)) == 0
    assert "works" in capsys.readouterr().out.splitlines()[-1]
    assert doctor.run(None, (GOOD, Probe("bad", lambda: finding, needed=True), ABSENT)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("does not work" in last, "bad" in last, "good" in last) == (True, True, False)


def test_a_probe_that_raises_is_a_row():
    check(finding := examine(Probe("fuse", Mock(side_effect=KeyError("surprise")))), "failed", "KeyError: 'surprise'")
    assert finding.cure


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "✓"), ("ascii", "ok"), ("latin-1", "ok")])
def test_marks_fit_the_encoding_of_the_output(encoding, mark):
    text = Style.of(io.TextIOWrapper(io.BytesIO(), encoding=encoding)).row("path", ok("/home/Jürgen/→", "see ✓"))
    assert text.startswith(mark)
    text.encode(encoding)


def test_the_real_doctor_ends_well(capfd):
    assert cli.main(["doctor"]) == 0
    out = capfd.readouterr().out
    *rows, last = [line for line in out.splitlines() if line[:1].strip()]  # other lines continue a row
    for row, probe in zip(rows, doctor.PROBES, strict=True):
        assert row[2:].startswith(probe.name)
        assert row[0] == "✓" or not probe.needed
    assert "the probe failed" not in out
    assert last == "Training on the CPUs of this machine works."


def test_settings_hide_the_secret_and_children_do_not_take_themselves_for_ranks(monkeypatch):
    monkeypatch.setenv("DISTOPT_TIMEOUT", "7")
    monkeypatch.setenv("DISTOPT_JOB_SECRET", "sesame")
    finding = host.settings()
    check(finding, "ok", "DISTOPT_TIMEOUT=7")
    assert "DISTOPT_JOB_SECRET=..." in finding.found
    assert "sesame" not in finding.found
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    env = unlaunched_environment()
    assert not env.keys() & {"PMI_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"}
    assert env["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


SLEEPS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(9)'])"


# -- children ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("code", "message", "seconds"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV", 60.0),
        ("raise SystemExit('no licence')", "exit code 1: no licence", 60.0),
        (SLEEPS, "no answer within 0.5 s", 0.5),
    ],
)
def test_a_child_that_does_not_answer_is_described(monkeypatch, code, message, seconds):
    run_code = partial(run_bounded, [sys.executable, "-c", code])
    monkeypatch.setattr("distopt.cli.doctor.ask.run_bounded", lambda command, *options: run_code(*options))
    ask.cache_clear()
    refused(DistoptError, message, ask, "numpy", seconds=seconds)


def test_what_a_library_prints_does_not_spoil_the_answer():
    code = """
import os
from distopt.cli.doctor.ask import QUESTIONS, answer
QUESTIONS["chatty"] = lambda: {"version": 7, "said": print("welcome"), "wrote": os.write(1, b"banner")}
answer("chatty", ())
print("goodbye")
"""
    ended = run_bounded([sys.executable, "-c", code], 20.0)
    assert ended.stdout == '{"version": 7, "said": null, "wrote": 6}'
    assert "welcome" in ended.stderr


# -- machine -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b\n", {"cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/host/path\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("4:cpu:/job\n0::/\n", {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 3.0),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("7:cpuset:/job\n", {"cpuset/job/cpu.max": "100000 100000\n"}, None),
        ("", {}, None),
    ],
)
def test_cpu_quota(tmp_path, membership, files, quota):
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").write_text(membership)
    assert host.cpu_quota(tmp_path / "fs", tmp_path / "self") == quota


@pytest.mark.parametrize(("free", "state"), [(1 << 30, "ok"), (0, "failed")])
def test_without_memfd_the_ranks_need_room_in_dev_shm(monkeypatch, free, state):
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_frsize=1, f_blocks=1 << 30, f_bavail=free))
    check(host.shared_memory(), state, "Operation not permitted", "shm-size")


# -- what a probe finds ------------------------------------------------------------------------------------------------
STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
STEP |= {"SLURM_CLUSTER_NAME": "c", "SLURM_STEP_NODELIST": "n[3-4]"}
OUTSIDE = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
TWO_NODES = STEP | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}
OVER_MPI = TWO_NODES | {"DISTOPT_TRANSPORT": "mpi"}
MPIEXEC, PMI2 = {"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_JOBID": "7.0"}
LIBRARY = "MPICH Version: 5.0.2 MPICH Release date: Fri"
MPICH = {"mpi4py": "4.1", "library": LIBRARY, "standard": "5.0", "path": "/lib/m"}
UCX, NO_UCX = {"version": "1.22.0", "path": "/u"}, DistoptError("MissingDependencyError: there is no UCX")
NO_NUMPY, CRASH = ModuleNotFoundError("No module named 'numpy'"), DistoptError("crashed with SIGILL")
NOT_LOADED, BROKEN_UCX = DistoptError("RuntimeError: cannot load MPI"), DistoptError("OSError: /u: cannot open")
GLOO, OURS = {"version": "2.13.0", "gloo": "gloo"}, {"version": "2.13.0", "gloo": "distopt"}
INSTALL_UCX, INSTALL_MPI = "pip install libucx-cu12", "pip install mpi4py mpich"
# By the probe: variables, answers to questions, the state, and parts of what is found and of the cure.
FOUND = {
    host.launcher_variables: [
        ({}, {}, "absent", "by hand", ""),
        (MPIEXEC, {}, "ok", "PMI_RANK=1", ""),
        ({"PMI_RANK": "1"}, {}, "failed", "PMI_SIZE", ""),
        (OUTSIDE, {}, "ok", "outside a step", ""),
        (STEP | {"SLURM_STEP_NUM_NODES": "1"}, {}, "ok", "by shared memory", ""),
        (STEP | {"SLURM_STEP_NUM_NODES": "2"}, {}, "ok", "; rank 0 on n3", ""),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "failed", "MASTER_ADDR is not set", ""),
    ],
    hosts.transport: [
        ({}, {"ucx": UCX}, "ok", "UCX 1.22.0 under distopt run, torchrun and srun", ""),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, {"ucx": UCX}, "ok", "by interface ib0 (GLOO_SOCKET_IFNAME)", ""),
        (TWO_NODES, {"ucx": UCX}, "ok", "UCX 1.22.0 under srun", ""),
        (TWO_NODES, {"ucx": NO_UCX}, "absent", "none under srun: there is no UCX", INSTALL_UCX),
        (TWO_NODES | PMI2, {"ucx": NO_UCX, "mpi": MPICH}, "ok", "MPI: srun connects the ranks", ""),
        (MPIEXEC, {"ucx": NO_UCX, "mpi": MPICH}, "ok", "MPI: mpiexec of MPICH", ""),
        (OVER_MPI, {"ucx": UCX, "mpi": MPICH}, "failed", "srun cannot connect the ranks of MPI", ""),
    ],
    host.numpy: [({}, {"numpy": error}, "failed", str(error), "pip install") for error in (NO_NUMPY, CRASH)],
    host.core: [({}, {"core": error}, "failed", str(error), "pip install") for error in (NO_NUMPY, CRASH)],
    hosts.ucx: [
        ({}, {"ucx": UCX}, "ok", "1.22.0, /u", ""),
        ({}, {"ucx": NO_UCX}, "absent", "not installed", ""),
        ({}, {"ucx": BROKEN_UCX}, "failed", "cannot open", ""),
    ],
    mpi.library: [
        ({}, {"mpi": ModuleNotFoundError("mpi4py")}, "absent", "", INSTALL_MPI),
        ({}, {"mpi": NOT_LOADED}, "failed", "", INSTALL_MPI),
    ],
    host.torch: [
        ({}, {"torch": GLOO}, "ok", "are Gloo's (without DISTOPT_AS_GLOO=1)", ""),
        ({"DISTOPT_AS_GLOO": "1"}, {"torch": OURS}, "ok", "are distopt's (DISTOPT_AS_GLOO=1)", ""),
        ({"DISTOPT_AS_GLOO": "1"}, {"torch": GLOO}, "failed", "are Gloo's (DISTOPT_AS_GLOO=1)", ""),
        ({}, {"torch": ModuleNotFoundError("torch")}, "absent", "not installed", ""),
    ],
}
OF_LAUNCHERS = "PMI|OMPI|SLURM|MPI_|RANK|WORLD_SIZE|LOCAL_RANK|DISTOPT_AS_GLOO"


@pytest.mark.parametrize(("probe", "case"), [(probe, case) for probe, cases in FOUND.items() for case in cases])
def test_what_a_probe_finds(answer, monkeypatch, probe, case):
    variables, answers, state, found, cure = case
    for name in filter(re.compile(OF_LAUNCHERS).match, list(os.environ)):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer.update(answers)
    check(probe(), state, found, cure)


# -- MPI ---------------------------------------------------------------------------------------------------------------
HYDRA = Ended(0, "HYDRA build details: Version: 5.0.2", "")


def test_mpi_library_row(answer, monkeypatch):
    answer["mpi"] = MPICH
    monkeypatch.setattr(mpi, "version_of", lambda name: "1" if name == "mpich" else None)
    assert mpi.library().found == "mpi4py 4.1, MPICH 5.0.2 (MPI 5.0), /lib/m"
    monkeypatch.setattr(mpi, "version_of", lambda name: "1")
    check(mpi.library(), "failed", "shadow")


TWO, SEE = Ended(0, "2\n2\n", ""), " (MPICH) starts 2 ranks that see each other"
ACTIVATE = ": write the path, or activate the environment"


@pytest.mark.parametrize(
    ("first", "ended", "state", "said"),
    [
        ("/usr/bin/mpiexec", TWO, "ok", f"{SEE}; the PATH has /usr/bin/mpiexec{ACTIVATE}"),
        (None, TWO, "ok", f"{SEE}; the PATH has none{ACTIVATE}"),
        ("", TWO, "ok", SEE),
        ("", Ended(0, "1\n1\n", ""), "failed", "2 jobs of one rank"),
        ("", Ended(1, "", "mpiexec has detected an attempt to run as root."), "failed", "refuses to run as root"),
        ("", Ended(None, "", ""), "failed", "no answer within"),
        ("", Ended(0, "2\n", ""), "failed", "they printed ['2']"),
    ],
)
def test_the_mpiexec_beside_this_python_is_tried_first(answer, monkeypatch, tmp_path, first, ended, state, said):
    beside = tmp_path / "mpiexec"
    beside.touch()
    answer["mpi"] = MPICH
    tried = Mock(side_effect=[HYDRA, ended])
    monkeypatch.setattr(mpi.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(mpi.shutil, "which", lambda name: str(beside) if first == "" else first)
    monkeypatch.setattr(mpi, "run_bounded", tried)
    check(finding := mpi.launcher(), state, said)
    assert [call.args[0][0] for call in tried.mock_calls] == [str(beside)] * 2
    assert finding.found == f"{beside}{said}" if state == "ok" else finding.cure


# -- GPUs --------------------------------------------------------------------------------------------------------------
NO_LIBRARY = DistoptError("OSError: libcuda.so.1: cannot open shared object file: No such file or directory")


@pytest.mark.parametrize(
    "devices", [ModuleNotFoundError("pynvml"), DistoptError("NVMLError_LibraryNotFound: NVML Shared Library Not Found")]
)
def test_without_a_gpu_nothing_is_wrong(answer, monkeypatch, devices):
    answer.update(driver=NO_LIBRARY, devices=devices, cupy=ModuleNotFoundError("cupy"))
    monkeypatch.setattr(gpu, "version_of", lambda name: None)
    for probe in (gpu.driver, gpu.devices, gpu.cupy, gpu.nccl):
        assert (probe().state, probe().cure) == ("absent", "")


@pytest.mark.parametrize(("driver", "extra"), [(12040, "cuda12"), (13000, "cuda13")])
def test_with_a_driver_the_missing_packages_have_a_cure(answer, monkeypatch, driver, extra):
    answer.update(driver={"version": driver, "path": "/lib/libcuda.so"}, nccl=partial(ask, "nccl"))
    answer.update(devices=ModuleNotFoundError("pynvml"))
    monkeypatch.delenv("DISTOPT_NCCL_LIBRARY", raising=False)
    monkeypatch.setattr(gpu, "version_of", lambda name: None)
    assert f"CUDA {driver // 1000}.{driver % 1000 // 10}" in gpu.driver().found
    assert extra in gpu.cupy().cure
    assert extra in gpu.devices().cure
    assert (gpu.nccl().state == "absent") == (extra in gpu.nccl().cure)


@pytest.mark.parametrize(("made", "fact", "cure"), [(False, "is not a file", "give the path"), (True, "short", "pip")])
def test_nccl_is_the_library_that_communicators_take(answer, monkeypatch, tmp_path, made, fact, cure):
    library = tmp_path / "libnccl.so.2"
    if made:
        library.touch()
    answer.update(driver={"version": 13000, "path": ""}, nccl=lambda major: ask.__wrapped__("nccl", major))
    monkeypatch.setenv("DISTOPT_NCCL_LIBRARY", str(library))
    check(gpu.nccl(), "failed", str(library), cure)
    assert fact in gpu.nccl().found


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv", [[], ["--help"], ["doctor", "--help"]])
def test_help(argv, capsys):
    assert cli.main(argv) == 0
    assert "usage: distopt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error", "code", "text"),
    [
        ("fly", None, 2, "distopt: * (see distopt --help)\n"),
        ("doctor now", None, 2, "distopt doctor: *now (see distopt doctor --help)\n"),
        ("doctor --nope", None, 2, "distopt doctor: unrecognized arguments: --nope (see distopt doctor --help)\n"),
        ("doctor", UsageError("size '1X' is not a number"), 2, "*size '1X'*"),
        ("doctor", DistoptError("no room"), 1, "*no room*"),
        ("doctor", KeyboardInterrupt(), 130, "*interrupted*"),
        ("doctor", IsADirectoryError(21, "Is a directory", "/runs/r.json"), 1, "*Is a directory: '/runs/r.json'*"),
    ],
)
def test_wrong_arguments_and_errors_of_a_command_get_one_line(monkeypatch, capsys, words, error, code, text):
    if error:
        monkeypatch.setattr("distopt.cli.doctor.run", Mock(side_effect=error))
    assert cli.main(words.split()) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert fnmatchcase(err, text)


def test_a_reader_that_leaves_early_gives_no_traceback():
    code = "import sys; from distopt import cli; sys.exit(cli.main(['doctor']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
