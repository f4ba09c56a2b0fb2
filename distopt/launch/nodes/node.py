"""A node of a job, as the owner of the endpoint sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..stopwatch import Stopwatch

NO_RANK = 0xFFFFFFFF  # the number of a node that leaves it to the owner


@dataclass(eq=False)
class Node:
    """An agent, as the owner sees it.

    Attributes:
        host: name of its host.
        pid: its process.
        wanted: the number that its command line gives it, or `NO_RANK`.
        ranks: how many ranks it starts.
        most: how many it starts unless one of them keeps failing.
        spare: how many of these the job can do without.
        attempt: the last one that it was part of; -1: none.
        port: a free TCP port of its host.
        send: sends it a message.
        address: how the other nodes reach it.
        number: its number among the nodes; -1: it takes part in the next attempt.
        ended: whether all its ranks have ended, or the agent itself.
        signals: those that it has passed on to its ranks.
        steps: the newest that each of its ranks has done; 0: none, for example if the agent has replaced another.
        away: whether it is cut off or lost, and the others wait for it, or for another in its place.
        heard: since the last sign of life.
    """

    host: str
    pid: int
    wanted: int
    send: Callable[[dict[str, Any]], None]
    address: str
    ranks: int = 0
    most: int = 0
    spare: int = 0
    attempt: int = -1
    port: int = 0
    number: int = -1
    ended: bool = False
    signals: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    away: bool = False
    heard: Stopwatch = field(default_factory=Stopwatch)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.host} (pid {self.pid})"
