"""Groups under every launcher and init method; how their jobs end."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from distopt.cli.run import add_parser

from .ends import LAUNCHERS, PROGRAMS, run

SCRIPT = str(Path(__file__).with_name("launched.py"))
BIN = Path(sys.executable).parent
ROOT = str(Path(__file__).resolve().parents[2])
MPIEXEC = [str(BIN / "mpiexec"), "-n", "2", sys.executable, SCRIPT]


def test_distopt_run_has_torchruns_options() -> None:
    """Each has its row in the documentation, and takes a value if torchrun's does; two are refused."""
    from torch.distributed.run import get_args_parser

    commands = argparse.ArgumentParser().add_subparsers()
    add_parser(commands)
    ours = commands.choices["run"]._option_string_actions
    page = Path(ROOT, "docs", "guide", "launching.md").read_text()
    for action in get_args_parser()._actions[1:]:
        for name in action.option_strings:
            if "_" not in name:
                assert f"`{name}" in page, f"docs/guide/launching.md does not name {name}"
            if "virtual" not in name and "completion" not in name:
                assert name in ours, f"distopt run does not know torchrun's {name}"
                assert (ours[name].nargs == 0) == (action.nargs == 0), name


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


def test_distopt_alone_does_not_import_torch() -> None:
    code = "import sys, distopt, distopt.opt, distopt.comm, distopt.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_pytorch_the_cure_is_told() -> None:
    code = "import sys; sys.modules['torch'] = None; import distopt.torch"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1].endswith("; pip install torch")


# -- scripts that just end; ends.py repeats this many times ------------------------------------------------------------
@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=8)
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


READS = """
import os, sys
from distopt.launch.heal.fork_server import _OF_RANKS
kind = type(os.environ)
read = kind.__getitem__

def watched(env, name):
    reader = sys._getframe(2).f_globals["__name__"]
    if name in _OF_RANKS and reader != "tqdm.utils":  # which looks for names that begin with TQDM_
        print(name, "is read by", reader)
    return read(env, name)

kind.__getitem__ = watched
import torch.distributed.optim, torch._dynamo, torch.utils.data, torch.nn.parallel, distopt.torch
"""


def test_pytorch_reads_no_variable_of_a_rank_when_it_is_imported() -> None:
    """`distopt.launch.heal.modules` relies on that: one process imports it for all ranks."""
    env = {**os.environ, "PYTHONPATH": ROOT, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", READS], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == ""


HELPERS = """
import os, sys
import torch, torch.distributed as dist
import distopt.torch

def helper(rank, size, place):
    try:
        dist.init_process_group("distopt", init_method=place, rank=rank, world_size=size)
        dist.all_reduce(total := torch.full((1,), rank + 1.0))
        print("helper", rank, "has", total.item(), flush=True)
        dist.destroy_process_group()
    except RuntimeError as error:  # of rank 0 that its port is taken
        print("helper", rank, "is refused:", error, flush=True)

if __name__ == "__main__":
    method, place = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("distopt")
    process = torch.multiprocessing.get_context(method).Process(target=helper, args=(rank, size, place))
    process.start()
    process.join()
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow(kept=2)
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("place", ["file", "tcp", "env://"])
def test_helpers_of_ranks_make_a_group_of_their_own(method: str, place: str, port: int, tmp_path: Path) -> None:
    """They name a place, a rank and a size; at the launcher's own place, they would disturb the ranks."""
    script = tmp_path / "script.py"
    script.write_text(HELPERS)
    place = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{port}"}.get(place, place)
    run = [sys.executable, "-m", "distopt", "run", "--nproc-per-node", "2", str(script), method, place]
    env = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    said = "is refused" if place == "env://" else "has 3.0"
    assert all(f"helper {rank} {said}" in ended.stdout for rank in range(2)), ended.stdout
