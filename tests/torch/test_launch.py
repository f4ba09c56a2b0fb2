"""Groups under every launcher and init method; how their jobs end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from .ends import LAUNCHERS, PROGRAMS, run

SCRIPT = str(Path(__file__).with_name("launched.py"))
BIN = Path(sys.executable).parent
ROOT = str(Path(__file__).resolve().parents[2])
MPIEXEC = [str(BIN / "mpiexec"), "-n", "2", sys.executable, SCRIPT]


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=4)
@pytest.mark.parametrize("method", ["env://", "tcp", "file"])
@pytest.mark.parametrize("launcher", ["torchrun", "distopt run", "mpiexec", "spawn"])
def test_ranks_meet(launcher: str, method: str, port: int, tmp_path: Path) -> None:
    place = {"env://": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/store"}[method]
    if launcher == "mpiexec" and not (BIN / "mpiexec").exists():
        pytest.skip("no mpiexec")
    if method == "tcp" and launcher in ("torchrun", "distopt run"):
        pytest.skip("the launcher gives the place")
    commands = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"],
        "distopt run": [sys.executable, "-m", "distopt", "run", "--nproc-per-node", "2"],
    }
    command = {"mpiexec": [*MPIEXEC, place], "spawn": [sys.executable, SCRIPT, "spawn", "2", place]}.get(launcher)
    command = command or [*commands[launcher], SCRIPT, place]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    if launcher == "distopt run":
        del variables["MASTER_ADDR"], variables["MASTER_PORT"]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 is done" in ended.stdout


@pytest.mark.slow
def test_spawn_raises_an_error_that_names_the_rank_that_failed_first(port: int) -> None:
    """PyTorch raises the error of the process that ends first, which may be a consequence."""
    command = [sys.executable, SCRIPT, "spawn", "3", f"tcp://127.0.0.1:{port}", "fail"]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    last = ended.stderr.rstrip().splitlines()[-1]
    assert re.search(r"ValueError: the mistake of rank 1$|DistBackendError: rank 1 \(host ", last), ended.stderr


@pytest.mark.slow
def test_import_of_torch_alone_loads_nothing_of_distopt() -> None:
    code = "import sys, torch; assert 'distopt' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_distopt_alone_does_not_import_torch() -> None:
    code = "import sys, distopt, distopt.opt, distopt.comm, distopt.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_pytorch_the_cure_is_told() -> None:
    code = "import sys; sys.modules['torch'] = None; import distopt.torch"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1].endswith("; pip install torch")


# -- scripts that just end; ends.py repeats this many times ------------------------------------------------------------
@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=len(PROGRAMS))
@pytest.mark.parametrize("destroys", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_job_ends(program: str, destroys: bool) -> None:
    launcher = LAUNCHERS[(list(PROGRAMS).index(program) + destroys) % len(LAUNCHERS)]
    code, text = run(launcher, 2, program, destroys=destroys)
    assert code == 0, text
    assert not re.search("Traceback|terminate called", text), text


# -- a rank that fails ends all others, which name it; faults.py has the ranks -----------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("trials", ["1", pytest.param("8", marks=[pytest.mark.slow, pytest.mark.sweep])])
def test_failures_are_named(trials: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.torch.faults", trials],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
