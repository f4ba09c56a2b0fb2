"""The place of a process in a job, as far as the process that started it has given it one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Origin:
    """The place of this process in a job, as known before it joins one.

    Attributes:
        invitation: ticket, rank and world size of the job whose `main` or `spawn` started this process, if one did.
        rank_and_size: rank and world size, if `main` runs its function in this process, as a rank of a launcher's job.
        tickets: for each secret of a ticket made here, the process that made it: this one, or an ancestor by fork.
    """

    invitation: tuple[Any, int, int] | None = None
    rank_and_size: tuple[int, int] | None = None
    tickets: dict[bytes, int] = field(default_factory=dict)


origin = Origin()
