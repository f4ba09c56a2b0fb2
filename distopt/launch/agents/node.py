"""The nodes of a job, as the owner of the endpoint sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..processes import ENDING_SIGNALS
from ..stopwatch import Stopwatch

NO_RANK = 0xFFFFFFFF  # the number of a node that leaves it to the owner


@dataclass(eq=False)
class Node:
    """A node of the job: its agent and its ranks, as the owner of the endpoint sees them.

    Attributes:
        host: name of its host.
        pid: its process.
        wanted: the number that its command line gives it, or `NO_RANK`.
        ranks: how many ranks it starts.
        most: how many it starts unless one of them keeps failing.
        spare: how many of these the job can do without.
        attempt: the last one that it was part of; -1: none.
        port: a free TCP port of its host.
        id: of its agent, in a job that heals on several nodes.
        peer: the port at which its agent hears others, in such a job.
        states: the port where it takes states of the node before; 0: none.
        send: sends it a message.
        address: how the other nodes reach it.
        number: its number among the nodes; -1: it takes part in the next attempt.
        ready: whether it starts ranks without long imports; the job continues until then.
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
    id: str = ""
    peer: int = 0
    states: int = 0
    number: int = -1
    ready: bool = True
    ended: bool = False
    signals: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    away: bool = False
    heard: Stopwatch = field(default_factory=Stopwatch)

    @property
    def name(self) -> str:
        """The node's name in messages."""
        return f"{self.host} (pid {self.pid})"

    def to_json(self) -> dict[str, Any]:
        """Its description for another owner."""
        names = ("host", "pid", "wanted", "address", "ranks", "most", "spare", "peer", "number")
        return {name: getattr(self, name) for name in names}

    def become(self, said: dict[str, Any]) -> None:
        """Take over what `to_json` of this node has said elsewhere; its ranks have ended."""
        for name, value in said.items():
            setattr(self, name, value)
        self.ended = True


class Nodes(list[Node]):
    """The nodes of a job, those that come and those that are away included; by number, once they have numbers.

    Args:
        own: that of the owner.
        most: how many the job can have.
        least: how many it needs.

    Attributes:
        most: the argument.
        least: the argument.
    """

    def __init__(self, own: Node, most: int, least: int) -> None:
        super().__init__([own])
        self._own = own
        self.most, self.least = most, least

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may be lost or come."""
        return self.least < self.most

    @property
    def n_present(self) -> int:
        """How many are not away."""
        return sum(not node.away for node in self)

    @property
    def members(self) -> list[Node]:
        """The nodes of this attempt."""
        return [node for node in self if node.number >= 0]

    @property
    def n_ranks(self) -> int:
        """How many ranks all nodes start."""
        return sum(node.ranks for node in self)

    @property
    def signals(self) -> list[int]:
        """The signals that agents have passed on to their ranks."""
        return [signum for node in self for signum in node.signals]

    @property
    def ending_signals(self) -> list[int]:
        """The signals among them that end the job."""
        return [signum for signum in self.signals if signum in ENDING_SIGNALS]

    @property
    def names(self) -> str:
        """The nodes' names in messages."""
        return ", ".join(node.name for node in self)

    @property
    def newest_step(self) -> int:
        """The newest step that a rank of this attempt has done; 0: none. Others may have older ones."""
        return max((step for node in self.members for step in node.steps), default=0)

    def number(self) -> None:
        """Number the nodes as their command lines say, and the others after the owner, by their names."""
        free = [number for number in range(self.most) if number not in [node.wanted for node in self]]
        for node in sorted(self, key=lambda node: (node is not self._own, node.host, node.pid)):
            node.number = free.pop(0) if node.wanted == NO_RANK else node.wanted
        self.sort(key=lambda node: node.number)

    def first_rank(self, node: Node) -> int:
        """The first rank of a node that has a number."""
        return sum(other.ranks for other in self[: node.number])

    def of_rank(self, rank: int) -> Node:
        """The node that starts a rank of this attempt."""
        return max((node for node in self.members if self.first_rank(node) <= rank), key=self.first_rank)

    def steps(self) -> list[int]:
        """The newest step that each rank has done, in rank order; 0 of ranks whose agent reports none."""
        return [step for node in self for step in (node.steps or [0] * node.ranks)[: node.ranks]]
