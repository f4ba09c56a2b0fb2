"""How messages name ranks. This module needs little of the standard library, so that a server can start at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence


def this_rank(rank: int, size: int) -> str:
    """This process, which is that rank of a job of that size."""
    return f"rank {rank} of {size} on {socket.gethostname()} (pid {os.getpid()})"


def rank_here(rank: int, pid: int) -> str:
    """A process on this host, which is that rank."""
    return f"rank {rank} on {socket.gethostname()} (pid {pid})"


def ranks_of(ranks: Sequence[int], size: int) -> str:
    """Some ranks of a job of that size."""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} of {size}"


def waits_for(rank: int, whom: str) -> str:
    """A wait of this process, which is that rank, while the ranks set up their job."""
    return f"rank {rank} (pid {os.getpid()}) waits in the set-up of the job for {whom}"
