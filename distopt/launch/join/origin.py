"""What a process knows of its place in a job before it joins one."""

from __future__ import annotations

import os
from typing import Any


class Origin:
    """Where this process comes from.

    Attributes:
        invitation: ticket, rank and world size of the job whose `main` or `spawn` started this process, if one did.
        place: rank and world size, if `main` runs its function in this process, as a rank of a launcher's job.
    """

    def __init__(self) -> None:
        self.invitation: tuple[Any, int, int] | None = None
        self.place: tuple[int, int] | None = None
        self._secrets: dict[bytes, int] = {}  # of the tickets made here: by which process, this one or a parent

    def made(self, secret: bytes) -> None:
        """Local. This process has made a ticket."""
        self._secrets[secret] = os.getpid()

    def has_made(self, secret: bytes) -> bool:
        """Local. Whether this process has, and not one that it was forked from."""
        return self._secrets.get(secret) == os.getpid()


origin = Origin()
