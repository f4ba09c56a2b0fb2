"""`import torch` registers the backend, and with DISTOPT_AS_GLOO=1 groups by the name "gloo" are distopt's."""

import re
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, Ended, Program

torch = pytest.importorskip("torch")

SCRIPT = str(ROOT / "tests" / "torch" / "autoloaded.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
RUN = [sys.executable, "-m", "distopt", "run", "--nproc-per-node", "2"]
OURS, GLOO = "DistoptProcessGroup", "ProcessGroup"


def run(*words: str, **env: str) -> Ended:
    found = Program([*words], {"OMP_NUM_THREADS": "1", **env}).end()
    assert found.code == 0, found
    return found


# By what is tested: code that runs when Python starts, the scenarios, variables, and a pattern of the output.
HIDE = "import sys; sys.modules['distopt._core'] = None"
BREAK = "import os; os.environ.pop('DISTOPT_AS_GLOO', None); import distopt.autoload as a; a.os = None"
NOTHING_ELSE = rf"modules \['distopt', 'distopt.autoload'\]\ngroup <{OURS}: rank 0 of 1 over single>"
ALONE = {
    "importing torch imports nothing else, and the backend no more": ("", "imported alone", {}, NOTHING_ELSE),
    "it is the user's choice": ("", "alone", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, r"\Aerror "),
    "without the native module": (HIDE, "alone", {}, r"\Aerror .*distopt\._core"),
    "a failure to register is a warning": (BREAK, "imported", {}, r"could not be set up.*must import distopt\.torch"),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_process(name: str, tmp_path: Path) -> None:
    start, scenarios, variables, expected = ALONE[name]
    (tmp_path / "sitecustomize.py").write_text(f"{start}\n")
    found = run(sys.executable, SCRIPT, *scenarios.split(), PYTHONPATH=f"{tmp_path}:{ROOT}", **variables)
    assert re.search(expected, found.stdout + found.stderr, re.DOTALL), found


@pytest.mark.parametrize("launch", [[*TORCHRUN, SCRIPT], [*RUN, "--as-gloo", SCRIPT]], ids=["torchrun", "distopt run"])
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_groups_that_ask_for_gloo_are_distopts(launch: list[str], debug: str) -> None:
    """Also those that name no backend, and CPU tensors of groups that have another one for another device."""
    variable = {} if "--as-gloo" in launch else {"DISTOPT_AS_GLOO": "1"}
    can = torch.__version__ >= (2, 14)  # before, PyTorch puts no wrapper around the backend "fake"
    mixed = ["mixed"] if can or debug == "OFF" else []
    found = run(*launch, "groups", "by_default", *mixed, TORCH_DISTRIBUTED_DEBUG=debug, **variable)
    assert not mixed or ("takes no backend of Python beside others" in found.stderr) != can
    for rank in (0, 1):
        group = f"<{OURS}: rank {rank} of 2 over shm>"
        total = [2 * (i * 0.1) + 1 for i in range(5)]
        (line,) = re.findall(rf"group {rank} (.*)", found.stdout)
        assert line.startswith(f"gloo {group} {[OURS, OURS, OURS, GLOO]} "), line
        numbers = re.findall(r"[\d.]+", line.partition(f"'{GLOO}'] [")[2].partition("]")[0])
        assert [float(number) for number in numbers] == pytest.approx(total)
        assert line.endswith("[[0], [1, 1]] 0:30:00")
        assert found.stdout.count(f"default {rank} {OURS}") == 1, found
        lines = re.findall(rf"mixed {rank} (.*)", found.stdout)
        assert len(lines) == len(mixed), found
        for line in lines:
            assert line.startswith("cpu:gloo,cuda:fake ['")
            if debug == "OFF":
                assert line.count(f"<backend of {group}>") == 2 * can, line
                assert "FakeProcessGroup" in line
            assert line.endswith(" [0.0, 3.0, 6.0, 9.0, 12.0] [[1.5, 1.5]]"), line


def test_without_the_variable_gloo_is_gloo(port: int) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    by_default = run(sys.executable, SCRIPT, "by_default", DISTOPT_AS_GLOO="0", **alone)
    for found in (run(*TORCHRUN, SCRIPT, "groups"), by_default):
        assert GLOO in found.stdout
        assert OURS not in found.stdout


def test_the_port_of_a_group_that_has_ended_is_free(port: int) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = run(sys.executable, SCRIPT, "by_default", "port", DISTOPT_AS_GLOO="1", **alone)
    assert f"serves {port}" in found.stdout
    assert OURS in found.stdout


def test_spawned_workers_have_it(tmp_path: Path) -> None:
    found = run(sys.executable, SCRIPT, "spawn", f"file://{tmp_path}/store", DISTOPT_AS_GLOO="1")
    assert sorted(re.findall(r"spawned .*", found.stdout)) == [f"spawned {rank} {OURS} 3" for rank in (0, 1)], found
