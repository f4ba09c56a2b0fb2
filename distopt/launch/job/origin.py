"""The place of a process in a job, as far as whatever started it has said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Origin:
    """The place of this process in a job, as known before it joins one.

    Attributes:
        invitation: ticket, rank and world size of the job whose `main` or `spawn` started this process, if one did.
        place: rank and world size, if `main` runs its function in this process, as a rank of a launcher's job.
        tickets: the secrets of the tickets made here, and by which process: this one or one that it was forked from.
    """

    invitation: tuple[Any, int, int] | None = None
    place: tuple[int, int] | None = None
    tickets: dict[bytes, int] = field(default_factory=dict)


origin = Origin()
