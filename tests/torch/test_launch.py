"""Groups under every launcher and init method; how their jobs end."""

import argparse
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from distopt.cli.run import add_parser
from instruments.torch.ends import LAUNCHERS, PROGRAMS, run
from tests.processes import ROOT, Ended, Program, end_all, mpiexec_command

SCRIPT = str(ROOT / "tests" / "torch" / "launched.py")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
RUN = ["-m", "distopt", "run", "--nproc-per-node", "2"]


def ended(*words: str, code: int = 0, **variables: str) -> Ended:
    found = Program([sys.executable, *words], {"OMP_NUM_THREADS": "1", **variables}).end()
    assert found.code == code, found
    return found


def test_distopt_run_has_torchruns_options() -> None:
    """Each has its row in the documentation, and takes a value if torchrun's does; two are refused."""
    from torch.distributed.run import get_args_parser

    commands = argparse.ArgumentParser().add_subparsers()
    add_parser(commands)
    ours = commands.choices["run"]._option_string_actions
    page = (ROOT / "docs" / "guide" / "launching.md").read_text()
    for action in get_args_parser()._actions[1:]:
        for name in action.option_strings:
            if "_" not in name:
                assert f"`{name}" in page, f"docs/guide/launching.md does not name {name}"
            if "virtual" not in name and "completion" not in name:
                assert name in ours, f"distopt run does not know torchrun's {name}"
                assert (ours[name].nargs == 0) == (action.nargs == 0), name


@pytest.mark.slow(kept=1, rest=4)
@pytest.mark.parametrize("method", ["env://", "tcp", "file"])
@pytest.mark.parametrize("launcher", ["torchrun", "distopt run", "mpiexec", "spawn"])
def test_ranks_meet(launcher: str, method: str, port: int, tmp_path: Path) -> None:
    place = {"env://": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/store"}[method]
    if method == "tcp" and launcher in ("torchrun", "distopt run"):
        pytest.skip("the launcher gives the place")
    words = {
        "torchrun": [sys.executable, *TORCHRUN, f"--master-port={port}", SCRIPT],
        "distopt run": [sys.executable, *RUN, SCRIPT],
        "mpiexec": [*mpiexec_command(2), sys.executable, SCRIPT],
        "spawn": [sys.executable, SCRIPT, "spawn", "2"],
    }[launcher]
    variables = {"OMP_NUM_THREADS": "1"}
    if launcher != "distopt run":
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (found,) = end_all([Program([*words, place], variables)])
    for rank in range(2):
        assert f"rank {rank} of 2 is done" in found.stdout


@pytest.mark.slow
def test_spawn_raises_an_error_that_names_the_rank_that_failed_first(port: int) -> None:
    """PyTorch raises the error of the process that ends first, which may be a consequence."""
    found = ended(SCRIPT, "spawn", "3", f"tcp://127.0.0.1:{port}", "fail", code=1)
    last = found.stderr.rstrip().splitlines()[-1]
    assert re.search(r"ValueError: the mistake of rank 1$|DistBackendError: rank 1 \(host ", last), found.stderr


def test_distopt_alone_does_not_import_torch() -> None:
    ended("-c", "import sys, distopt, distopt.opt, distopt.comm, distopt.cli; assert 'torch' not in sys.modules")


def test_without_pytorch_the_cure_is_told() -> None:
    found = ended("-c", "import sys; sys.modules['torch'] = None; import distopt.torch", code=1)
    assert found.stderr.splitlines()[-1].endswith("; pip install torch")


# -- scripts that just end; ends.py repeats this many times ------------------------------------------------------------
@pytest.mark.slow(kept=1, rest=8)
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
    ended("-W", "ignore", "-m", "instruments.torch.faults", trials)


READS = """
import os, sys
from distopt.launch.heal.fork_server import _OF_RANKS
kind = type(os.environ)
read = kind.__getitem__

def watched(env, name):
    reader = sys._getframe(2).f_globals["__name__"]  # the module that reads, by way of `os.environ`
    if name in _OF_RANKS and reader != "tqdm.utils":  # which looks for names that begin with TQDM_
        print(name, "is read by", reader)
    return read(env, name)

kind.__getitem__ = watched
import torch.distributed.optim, torch._dynamo, torch.utils.data, torch.nn.parallel, distopt.torch
"""


def test_pytorch_reads_no_variable_of_a_rank_when_it_is_imported() -> None:
    """`distopt.launch.heal.modules` relies on that: one process imports it for all ranks."""
    of_rank_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    of_rank_1 |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert ended("-c", READS, **of_rank_1).stdout == ""


@pytest.mark.slow(kept=1, rest=1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("place", ["file", "tcp", "env://"])
def test_helpers_of_ranks_make_a_group_of_their_own(method: str, place: str, port: int, tmp_path: Path) -> None:
    """They name a place, a rank and a size; at the launcher's own place, they would disturb the ranks."""
    place = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{port}"}.get(place, place)
    found = ended(*RUN, SCRIPT, "helper", method, place)
    said = "helper {} is refused" if place == "env://" else "rank {} of 2 is done"
    assert all(said.format(rank) in found.stdout for rank in range(2)), found
