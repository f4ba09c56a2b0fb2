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
    return Program([*words], {"OMP_NUM_THREADS": "1", **env}).end()


def test_importing_torch_imports_nothing_else() -> None:
    found = run(sys.executable, SCRIPT, "imported")
    assert "modules ['distopt', 'distopt.autoload']" in found.stdout, found.stderr


def test_the_backend_needs_no_import() -> None:
    assert f"group <{OURS}: rank 0 of 1 over single>" in run(sys.executable, SCRIPT, "alone").stdout


def test_autoload_is_the_users_choice() -> None:
    found = run(sys.executable, SCRIPT, "alone", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found.stdout.startswith("error ")


@pytest.mark.parametrize("launch", [[*TORCHRUN, SCRIPT], [*RUN, "--as-gloo", SCRIPT]], ids=["torchrun", "distopt run"])
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_groups_that_ask_for_gloo_are_distopts(launch: list[str], debug: str) -> None:
    variable = {} if "--as-gloo" in launch else {"DISTOPT_AS_GLOO": "1"}
    found = run(*launch, "groups", TORCH_DISTRIBUTED_DEBUG=debug, **variable)
    assert found.code == 0, found.stderr
    for rank in (0, 1):
        group = f"<{OURS}: rank {rank} of 2 over shm>"
        total = [2 * (i * 0.1) + 1 for i in range(5)]
        (line,) = re.findall(rf"group {rank} (.*)", found.stdout)
        assert line.startswith(f"gloo {group} {[OURS, OURS, OURS, GLOO]} "), line
        numbers = re.findall(r"[\d.]+", line.partition(f"'{GLOO}'] [")[2].partition("]")[0])
        assert [float(number) for number in numbers] == pytest.approx(total)
        assert line.endswith("[[0], [1, 1]] 0:30:00")


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_beside_another_backend_distopt_serves_cpu_tensors(debug: str) -> None:
    can = torch.__version__ >= (2, 14)
    if debug == "DETAIL" and not can:
        pytest.skip('before 2.14, PyTorch puts no wrapper around the backend "fake"')
    found = run(*TORCHRUN, SCRIPT, "mixed", TORCH_DISTRIBUTED_DEBUG=debug, DISTOPT_AS_GLOO="1")
    assert found.code == 0, found.stderr
    assert ("takes no backend of Python beside others" in found.stderr) != can
    for rank in (0, 1):
        (line,) = re.findall(rf"mixed {rank} (.*)", found.stdout)
        assert line.startswith("cpu:gloo,cuda:fake ['")
        if debug == "OFF":
            assert line.count(f"<backend of <{OURS}: rank {rank} of 2 over shm>>") == 2 * can, line
            assert "FakeProcessGroup" in line
        assert line.endswith(" [0.0, 3.0, 6.0, 9.0, 12.0] [[1.5, 1.5]]"), line


def test_the_default_for_cpu_tensors_is_distopts() -> None:
    found = run(*TORCHRUN, SCRIPT, "by_default", DISTOPT_AS_GLOO="1")
    assert found.stdout.count(f"default 0 {OURS}") == found.stdout.count(f"default 1 {OURS}") == 1, found


def test_spawned_workers_have_it(tmp_path: Path) -> None:
    found = run(sys.executable, SCRIPT, "spawn", f"file://{tmp_path}/store", DISTOPT_AS_GLOO="1")
    assert sorted(re.findall(r"spawned .*", found.stdout)) == [f"spawned {rank} {OURS} 3" for rank in (0, 1)], found


def test_without_the_variable_gloo_is_gloo() -> None:
    for scenario in ("groups", "by_default"):
        found = run(*TORCHRUN, SCRIPT, scenario)
        assert found.code == 0, found.stderr
        assert GLOO in found.stdout
        assert OURS not in found.stdout


def test_torch_can_be_imported_without_the_native_module(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['distopt._core'] = None"
    (tmp_path / "sitecustomize.py").write_text(f"{hide}\n")
    found = run(sys.executable, SCRIPT, "alone", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "distopt._core" in found.stdout, found
    assert found.stdout.startswith("error ")


def test_a_failure_to_register_is_a_warning(tmp_path: Path) -> None:
    broken = "import os; os.environ.pop('DISTOPT_AS_GLOO', None); import distopt.autoload as a; a.os = None"
    (tmp_path / "sitecustomize.py").write_text(f"{broken}\n")
    found = run(sys.executable, SCRIPT, "imported", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert found.code == 0
    assert "could not be set up" in found.stderr
    assert "must import distopt.torch" in found.stderr
