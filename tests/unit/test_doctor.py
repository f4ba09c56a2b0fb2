"""`distopt doctor`: the rows, the exit code, and that no probe can bring it down."""

import io
import os
import sys
import types
from functools import partial

import pytest

from distopt import cli
from distopt.cli import doctor
from distopt.cli.doctor import gpu, host, hosts, mpi
from distopt.cli.doctor.ask import Ended, ask, run_bounded, unlaunched_environment
from distopt.cli.doctor.report import Probe, Style, absent, examine, failed, ok
from distopt.errors import DistoptError


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


def run(probes):
    return doctor.run(None, tuple(probes))


GOOD = Probe("good", lambda: ok("here"), needed=True)
ABSENT = Probe("extra", lambda: absent("not here", "get it"))
BROKEN = Probe("broken", lambda: failed("bent", "straighten it"))


# -- rows, table, exit code --------------------------------------------------------------------------------------
def test_optional_parts_do_not_change_the_exit_code(capsys):
    assert run([GOOD, ABSENT, BROKEN]) == 0
    assert "works" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("finding", [failed("bent", "straighten it"), absent("gone", "fetch it")])
def test_a_needed_part_does(finding, capsys):
    assert run([GOOD, Probe("bad", lambda: finding, needed=True), ABSENT]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "does not work" in last
    assert "bad" in last
    assert "good" not in last


def test_a_probe_that_raises_is_a_row():
    def explode():
        raise KeyError("surprise")

    finding = examine(Probe("fuse", explode))
    assert finding.state == "failed"
    assert "KeyError: 'surprise'" in finding.found
    assert finding.cure


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "✓"), ("ascii", "ok"), ("latin-1", "ok")])
def test_marks_fit_the_encoding_of_the_output(encoding, mark):
    style = Style.of(io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    text = style.row("path", ok("/home/Jürgen/→", "see ✓"))
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


def test_settings_are_listed_without_the_secret(monkeypatch):
    monkeypatch.setenv("DISTOPT_TIMEOUT", "7")
    monkeypatch.setenv("DISTOPT_JOB_SECRET", "sesame")
    finding = host.settings()
    assert finding.state == "ok"
    assert "DISTOPT_TIMEOUT=7" in finding.found
    assert "DISTOPT_JOB_SECRET=..." in finding.found
    assert "sesame" not in finding.found


# -- children ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("code", "message", "seconds"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV", 60.0),
        ("raise SystemExit('no licence')", "exit code 1: no licence", 60.0),
        (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(9)'])",
            "no answer within 0.5 s",
            0.5,
        ),
    ],
)
def test_a_child_that_does_not_answer_is_described(monkeypatch, code, message, seconds):
    run_code = partial(run_bounded, [sys.executable, "-c", code])
    monkeypatch.setattr("distopt.cli.doctor.ask.run_bounded", lambda command, *options: run_code(*options))
    ask.cache_clear()
    with pytest.raises(DistoptError, match=message):
        ask("numpy", seconds=seconds)


def test_what_a_library_prints_does_not_spoil_the_answer():
    code = """
import os
from distopt.cli.doctor.ask import QUESTIONS, answer
def chatty():
    os.write(1, b"banner")
    print("welcome")
    return {"version": 7}
QUESTIONS["chatty"] = chatty
answer("chatty", ())
print("goodbye")
"""
    ended = run_bounded([sys.executable, "-c", code], 20.0)
    assert ended.stdout == '{"version": 7}'
    assert "welcome" in ended.stderr


def test_children_do_not_take_themselves_for_ranks(monkeypatch):
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    env = unlaunched_environment()
    assert not env.keys() & {"PMI_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"}
    assert env["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


# -- software ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'numpy'"), DistoptError("crashed with SIGILL")])
@pytest.mark.parametrize("probe", [host.numpy, host.core])
def test_unusable_modules_are_rows_with_a_cure(answer, probe, error):
    answer.update(numpy=error, core=error)
    finding = probe()
    assert finding.state == "failed"
    assert str(error) in finding.found
    assert "pip install" in finding.cure


# -- machine -----------------------------------------------------------------------------------------------------------
def control_group(tmp_path, membership, files):
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").write_text(membership)
    return host.cpu_quota(tmp_path / "fs", tmp_path / "self")


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
    assert control_group(tmp_path, membership, files) == quota


@pytest.mark.parametrize(("free", "state"), [(1 << 30, "ok"), (0, "failed")])
def test_without_memfd_the_ranks_need_room_in_dev_shm(monkeypatch, free, state):
    def refuse(name, flags):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_frsize=1, f_blocks=1 << 30, f_bavail=free))
    finding = host.shared_memory()
    assert finding.state == state
    assert "Operation not permitted" in finding.found
    assert "shm-size" in finding.cure


STEP = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_STEP_NODELIST": "n[3-4]",
}


def launched_with(monkeypatch, variables):
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI", "SLURM", "MPI_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "state", "text"),
    [
        ({}, "absent", "by hand"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "ok", "PMI_RANK=1"),
        ({"PMI_RANK": "1"}, "failed", "PMI_SIZE"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "ok", "outside a step"),
        (STEP | {"SLURM_STEP_NUM_NODES": "1"}, "ok", "by shared memory"),
        (STEP | {"SLURM_STEP_NUM_NODES": "2"}, "ok", "; rank 0 on n3"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "failed", "MASTER_ADDR is not set"),
    ],
)
def test_launcher_variables(monkeypatch, variables, state, text):
    launched_with(monkeypatch, variables)
    finding = host.launcher_variables()
    assert finding.state == state
    assert text in finding.found


# -- several hosts -----------------------------------------------------------------------------------------------------
MPICH = {
    "mpi4py": "4.1",
    "library": "MPICH Version: 5.0.2 MPICH Release date: Fri",
    "standard": "5.0",
    "path": "/lib/m",
}
UCX, NO_UCX = {"version": "1.22.0", "path": "/u"}, DistoptError("MissingDependencyError: there is no UCX")
TWO_NODES = STEP | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}
PMI2 = {"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_JOBID": "7.0"}


@pytest.mark.parametrize(
    ("variables", "ucx", "state", "text"),
    [
        ({}, UCX, "ok", "UCX 1.22.0 under distopt run, torchrun and srun"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, UCX, "ok", "by interface ib0 (GLOO_SOCKET_IFNAME)"),
        (TWO_NODES, UCX, "ok", "UCX 1.22.0 under srun"),
        (TWO_NODES, NO_UCX, "absent", "none under srun: there is no UCX"),
        (TWO_NODES | PMI2, NO_UCX, "ok", "MPI: srun connects the ranks"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, NO_UCX, "ok", "MPI: mpiexec of MPICH"),
        (TWO_NODES | {"DISTOPT_TRANSPORT": "mpi"}, UCX, "failed", "srun cannot connect the ranks of MPI"),
    ],
)
def test_the_transport_between_hosts_and_why(answer, monkeypatch, variables, ucx, state, text):
    answer.update(mpi=MPICH, ucx=ucx)
    launched_with(monkeypatch, variables)
    finding = hosts.transport()
    assert finding.state == state
    assert text in finding.found
    assert ucx is UCX or state == "ok" or "pip install libucx-cu12" in finding.cure


@pytest.mark.parametrize(
    ("found", "state", "text"),
    [
        (UCX, "ok", "1.22.0, /u"),
        (NO_UCX, "absent", "not installed"),
        (DistoptError("OSError: /u: cannot open"), "failed", "cannot open"),
    ],
)
def test_ucx_row(answer, found, state, text):
    answer["ucx"] = found
    finding = hosts.ucx()
    assert (finding.state, text in finding.found) == (state, True)


@pytest.mark.parametrize(
    ("variable", "served_by", "state", "text"),
    [
        (None, "gloo", "ok", "are Gloo's (without DISTOPT_AS_GLOO=1)"),
        ("1", "distopt", "ok", "are distopt's (DISTOPT_AS_GLOO=1)"),
        ("1", "gloo", "failed", "are Gloo's (DISTOPT_AS_GLOO=1)"),
        ("1", ModuleNotFoundError("torch"), "absent", "not installed"),
    ],
)
def test_pytorch_row_says_who_serves_gloos_groups(answer, monkeypatch, variable, served_by, state, text):
    monkeypatch.delenv("DISTOPT_AS_GLOO", raising=False)
    if variable is not None:
        monkeypatch.setenv("DISTOPT_AS_GLOO", variable)
    answer["torch"] = served_by if isinstance(served_by, Exception) else {"version": "2.13.0", "gloo": served_by}
    finding = host.torch()
    assert (finding.state, text in finding.found) == (state, True), finding


# -- MPI ---------------------------------------------------------------------------------------------------------------
HYDRA = Ended(0, "HYDRA build details: Version: 5.0.2", "")


def test_mpi_library_row(answer, monkeypatch):
    answer["mpi"] = MPICH
    monkeypatch.setattr(mpi, "version_of", lambda name: "1" if name == "mpich" else None)
    assert mpi.library().found == "mpi4py 4.1, MPICH 5.0.2 (MPI 5.0), /lib/m"
    monkeypatch.setattr(mpi, "version_of", lambda name: "1")
    assert mpi.library().state == "failed"
    assert "shadow" in mpi.library().found


@pytest.mark.parametrize(
    ("error", "state"),
    [(ModuleNotFoundError("mpi4py"), "absent"), (DistoptError("RuntimeError: cannot load MPI library"), "failed")],
)
def test_without_mpi(answer, error, state):
    answer["mpi"] = error
    assert mpi.library().state == state
    assert "pip install mpi4py mpich" in mpi.library().cure


@pytest.mark.parametrize(
    ("ended", "state", "text"),
    [
        (Ended(0, "2\n2\n", ""), "ok", "see each other"),
        (Ended(0, "1\n1\n", ""), "failed", "2 jobs of one rank"),
        (Ended(1, "", "mpiexec has detected an attempt to run as root."), "failed", "refuses to run as root"),
        (Ended(None, "", ""), "failed", "no answer within"),
        (Ended(0, "2\n", ""), "failed", "they printed ['2']"),
    ],
)
def test_mpiexec_is_tried(answer, monkeypatch, ended, state, text):
    answer["mpi"] = MPICH
    monkeypatch.setattr(mpi.shutil, "which", lambda name: "/usr/bin/mpiexec")
    monkeypatch.setattr(mpi, "run_bounded", lambda command, *rest: HYDRA if "--version" in command else ended)
    finding = mpi.launcher()
    assert finding.state == state
    assert text in finding.found
    assert finding.cure or state == "ok"


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("/usr/bin/mpiexec", "; the PATH has /usr/bin/mpiexec: write the path, or activate the environment"),
        (None, "; the PATH has none: write the path, or activate the environment"),
        ("", ""),
    ],
)
def test_the_mpiexec_beside_this_python_is_tried_first(answer, monkeypatch, tmp_path, first, said):
    beside = tmp_path / "mpiexec"
    beside.touch()
    answer["mpi"] = MPICH
    tried = []
    monkeypatch.setattr(mpi.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(mpi.shutil, "which", lambda name: str(beside) if first == "" else first)
    monkeypatch.setattr(
        mpi,
        "run_bounded",
        lambda command, *rest: tried.append(command[0]) or (HYDRA if len(tried) == 1 else Ended(0, "2\n2\n", "")),
    )
    finding = mpi.launcher()
    assert tried == [str(beside)] * 2
    assert (finding.state, finding.found) == ("ok", f"{beside} (MPICH) starts 2 ranks that see each other{said}")


# -- GPUs --------------------------------------------------------------------------------------------------------------
NO_LIBRARY = DistoptError("OSError: libcuda.so.1: cannot open shared object file: No such file or directory")


@pytest.mark.parametrize(
    "devices", [ModuleNotFoundError("pynvml"), DistoptError("NVMLError_LibraryNotFound: NVML Shared Library Not Found")]
)
def test_without_a_gpu_nothing_is_wrong(answer, monkeypatch, devices):
    answer.update(driver=NO_LIBRARY, devices=devices, cupy=ModuleNotFoundError("cupy"))
    monkeypatch.setattr(gpu, "version_of", lambda name: None)
    for probe in (gpu.driver, gpu.devices, gpu.cupy, gpu.nccl):
        assert probe().state == "absent"
        assert probe().cure == ""


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
    finding = gpu.nccl()
    assert finding.state == "failed"
    assert str(library) in finding.found
    assert fact in finding.found
    assert cure in finding.cure
