"""Every import contract of pyproject.toml can fail: a violation planted in a copy of the package breaks it by name."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.processes import ROOT

LAYERS = "imports go down only"
NUMERICS = "the numerics know of no other rank, data of no transport"
ACYCLIC = "no cycles inside a room"
PYTORCH = "PyTorch is imported by its own room"
TORCH_LAYERS = "imports inside the PyTorch room go down only"
INSTRUMENTS = "the package needs none of its instruments"

# New modules and what each imports; a contract that this breaks; what the report says.
VIOLATIONS = {
    "nn comm": ({"nn.new": "distopt.comm"}, NUMERICS, "distopt.nn.new -> distopt.comm"),
    "nn sync": ({"nn.new": "distopt.sync"}, LAYERS, "distopt.nn.new -> distopt.sync"),
    "no layer": ({"new": "distopt.errors"}, LAYERS, "not listed as layers:\n\n- distopt.new\n"),
    "data examples": ({"data.new": "examples"}, INSTRUMENTS, "distopt.data.new -> examples"),
    "comm torch": ({"comm.new": "torch"}, PYTORCH, "distopt.comm.new -> torch"),
    "hosts group": (
        {"torch.hosts.new": "distopt.torch.group"},
        TORCH_LAYERS,
        "distopt.torch.hosts.new -> distopt.torch.group",
    ),
    "cycle": (
        {"data.new": "distopt.data.newer", "data.newer": "distopt.data.new"},
        ACYCLIC,
        "No cycles are allowed in distopt.data.",
    ),
}


def lint_imports(folder: Path, **new_modules: str) -> tuple[dict[str, str], str]:
    """Run lint-imports on a copy of the package with new modules: "KEPT" or "BROKEN" for each contract, the report."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "distopt", folder / "distopt", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name, imported in new_modules.items():
        (folder / "distopt" / name.replace(".", "/")).with_suffix(".py").write_text(f"import {imported}\n")
    # Without `site`, which would put the finder of the editable install ahead of this folder.
    command = [sys.executable, "-S", str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    results = dict(re.findall(r"^(\S.*) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
    assert done.returncode == ("BROKEN" in results.values()), done.stdout + done.stderr
    return results, done.stdout


def test_the_package_keeps_all_contracts(tmp_path: Path) -> None:
    results, report = lint_imports(tmp_path)
    assert results == dict.fromkeys((contract for _, contract, _ in VIOLATIONS.values()), "KEPT"), report


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=4)
@pytest.mark.parametrize("which", VIOLATIONS)
def test_a_violation_breaks_its_contract(tmp_path: Path, which: str) -> None:
    new_modules, contract, said = VIOLATIONS[which]
    results, report = lint_imports(tmp_path, **new_modules)
    assert results[contract] == "BROKEN", report
    assert said in report.partition("Broken contracts")[2].partition(f"\n{contract}\n")[2]


# The package itself is replaced by an empty one: its import acts, and says why. ctypes comes first: newer versions of
# libffi keep a file open.
MODULES = """
import ctypes, importlib, os, pkgutil, signal, sys, threading, types, distopt
package = sys.modules["distopt.launch"] = types.ModuleType("distopt.launch")
package.__path__ = [os.path.join(os.path.dirname(distopt.__file__), "launch")]
def state():
    hooks = sys.excepthook, sys.unraisablehook, sys.exit, os._exit, sys.stdout
    handlers = [signal.getsignal(signum) for signum in signal.valid_signals()]
    return hooks, handlers, dict(os.environ), sorted(os.listdir("/proc/self/fd")), threading.active_count()
before = state()
names = [found.name for found in pkgutil.walk_packages(package.__path__, "distopt.launch.")]
for name in names:
    importlib.import_module(name)
assert state() == before
assert "numpy" not in sys.modules
assert not sys.modules["distopt.launch.end_together.siblings"]._seen
print(len(names))
"""


def test_importing_a_module_of_launch_does_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40
