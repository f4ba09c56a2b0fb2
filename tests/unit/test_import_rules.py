"""Every import contract of pyproject.toml can fail, and importing the modules of launch does nothing."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.processes import ROOT

# New modules and what each imports, by the contract that this breaks.
VIOLATIONS = {
    "the numerics know of no other rank, data of no transport": {"nn.a": "distopt.comm"},
    "imports go down only": {"b": "distopt.errors", "nn.b": "distopt.engine"},
    "the package needs none of its instruments": {"data.c": "examples"},
    "PyTorch is imported by its own package": {"comm.d": "torch"},
    "imports inside distopt.torch go down only": {"torch.ddp.e": "distopt.torch.group"},
    "no cycles inside a package": {"engine.f": "distopt.engine.g", "engine.g": "distopt.engine.f"},
}
# Where the report does not say each of these imports.
SAID = {
    "imports go down only": ["not listed as layers:\n\n- distopt.b\n", "distopt.nn.b -> distopt.engine"],
    "no cycles inside a package": ["No cycles are allowed in distopt.engine."],
}


def test_violations_break_their_contracts(tmp_path: Path) -> None:
    """All of them, planted in a copy of the package; `make lint` shows that the package itself keeps its contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "distopt", tmp_path / "distopt", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for new_modules in VIOLATIONS.values():
        for name, imported in new_modules.items():
            (tmp_path / "distopt" / name.replace(".", "/")).with_suffix(".py").write_text(f"import {imported}\n")
    # Without `site`, which would put the finder of the editable install ahead of this folder.
    command = [sys.executable, "-S", str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    results = dict(re.findall(r"^(\S.*) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
    assert results == dict.fromkeys(VIOLATIONS, "BROKEN"), done.stdout + done.stderr
    for contract, new_modules in VIOLATIONS.items():
        said = SAID.get(contract, [f"distopt.{name} -> {imported}" for name, imported in new_modules.items()])
        report = done.stdout.partition("Broken contracts")[2].partition(f"\n{contract}\n")[2]
        assert all(text in report for text in said), report


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
