"""A checkout of Apache SINGA: its files with the imports renamed, and the environment in which they run.

SINGA's code is read where it lies, and never becomes a part of this project.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
_IMPORTED = ("pillow", "matplotlib", "scikit-learn")
# The same change as `sed -E 's/^( *(from|import) )singa\b/\1distopt/'`.
IMPORT = re.compile(r"^( *(?:from|import) )singa\b", re.MULTILINE)


def stop_unless(fact: object, message: str) -> None:
    """End the program with one line unless `fact` is true."""
    if not fact:
        sys.exit(f"{Path(sys.argv[0]).name}: {message}")


def rename_imports(source: Path, target: Path) -> None:
    """Copy a folder; its Python files import from `distopt` what they imported from `singa`."""
    stop_unless(source.is_dir(), f"{source} is no folder; name a checkout of github.com/apache/singa")
    shutil.copytree(source, target)
    for path in target.rglob("*.py"):
        path.write_text(IMPORT.sub(r"\1distopt", path.read_text()))


def packages(numpy: str) -> Path:
    """A folder with the given version of NumPy, and what the examples import; installed once, below build/."""
    folder = BUILD / f"singa-numpy-{numpy}"
    if not folder.exists():
        fresh = folder.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(fresh)]
        subprocess.run([*command, f"numpy=={numpy}.*", *_IMPORTED], check=True)
        fresh.rename(folder)
    return folder


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """The environment of a child that finds modules in `folders` first."""
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}


def run_within(
    seconds: float, command: list[str], folder: Path, variables: dict[str, str]
) -> tuple[int | None, str, str]:
    """Run a command; its exit code, or None if it took too long, its output and its errors.

    Nothing that it started outlives the limit.
    """
    process = subprocess.Popen(
        command, cwd=folder, env=variables, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=seconds)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return None, output, errors


def find_mpiexec() -> str:
    """The mpiexec that belongs to this Python, else that of the system."""
    own = Path(sys.executable).with_name("mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    stop_unless(found, "there is no mpiexec; install one with `make mpi`")
    return str(found)


def last_line(text: str) -> str:
    """A program's last line: the error, for one that failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
