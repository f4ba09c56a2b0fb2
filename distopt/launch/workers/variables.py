"""The environment of the ranks of a worker: where to read the address of the service, and the key to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_FILE, _KEY = "DISTOPT_WORKERS_FILE", "DISTOPT_WORKERS_KEY"
_BYTES = 512  # of the file, always: a reader finds no rest of a longer address


class Place(NamedTuple):
    """The service, as a rank finds it.

    Attributes:
        file: has its present address.
        key: of the job.
    """

    file: str
    key: bytes

    def find(self) -> tuple[str, int] | None:
        """Its host and port; None as long as no service is known, or the supervisor has ended."""
        try:
            host, _, port = Path(self.file).read_text(encoding="utf-8").strip().rpartition(" ")
        except OSError:
            return None
        return (host, int(port)) if host else None


class Sign:
    """Shows the ranks of this node where the service is: it may move.

    It is a file in memory, which nothing leaves behind, and which ranks open through /proc.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("distopt workers", os.MFD_CLOEXEC)
        self._file = f"/proc/{os.getpid()}/fd/{self._fd}"

    def show(self, host: str, port: int) -> None:
        """The service is there now."""
        os.pwrite(self._fd, f"{host} {port}".ljust(_BYTES).encode(), 0)

    def variables(self, key: bytes) -> dict[str, str]:
        """The environment of the process that supervises a worker; its ranks inherit it."""
        return {**os.environ, _FILE: self._file, _KEY: key.hex()}

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def place_in(env: Mapping[str, str]) -> Place | None:
    """The service; None if no `distopt run --workers` has started this process."""
    return Place(env[_FILE], bytes.fromhex(env[_KEY])) if env.get(_FILE) else None
