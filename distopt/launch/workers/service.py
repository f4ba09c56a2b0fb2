"""The service that names the members of averages: `Membership` behind a gate, with the values by which members meet.

On several nodes, it is part of the supervisor that the others have elected, as the owner of a job that heals
(`distopt.launch.agents.succession`). It decides only once its list of the nodes has been accepted, and while it is
certain that no other supervisor has been elected: two services never count averages at the same time.
"""

from __future__ import annotations

import json
import selectors
import time
from collections.abc import Callable
from functools import partial
from secrets import randbits
from typing import TYPE_CHECKING, Any

from ..addresses import is_own
from ..agents.monitor import Row
from ..agents.node import NO_RANK, Node
from ..gate import FOR_AGENT, FOR_MEMBERS, Gate, Link
from ..keys import Values
from ..sockets import say
from .membership import SILENT_SECONDS, Membership, Worker

if TYPE_CHECKING:
    from ..agents.election import Election
    from .monitor import WorkersMonitor

_COMING_SECONDS = 1.0  # then nodes of the last list that have not come to another service count as lost
_FRESH_SECONDS = 3.0  # then the first service begins without the others, unless it has met members of a living job


class Service(Gate):
    """The service. Supervisors of other nodes connect, too.

    Args:
        key: of the job.
        most: how many workers there can be.
        nodes: how many nodes there can be.
        own: this node; its address as the workers of others reach it.
        selector: waits for the connections.
        warn: prints a line.
        election: how the supervisors of several nodes elect one; None: there is one node.

    Attributes:
        membership: decides.
        monitor: shows the rows of all workers, under --watch.
    """

    monitor: WorkersMonitor | None = None

    def __init__(
        self,
        key: bytes,
        most: int,
        nodes: int,
        own: Node,
        selector: selectors.BaseSelector,
        warn: Callable[[str], None],
        election: Election | None,
    ) -> None:
        super().__init__(key, selector)
        self._most_nodes, self._own, self._warn, self._election = nodes, own, warn, election
        self._by_link: dict[Link, Node] = {}
        self._nodes = {own.id: own}
        self._coming_by: float | None = time.monotonic() + _FRESH_SECONDS
        self._is_open = election is None
        self._workers: dict[Link, Worker] = {}
        self._values = Values()
        self._epoch = 0  # of these values
        self._checked_at = time.monotonic()
        numbers = 0
        if election is not None and not (last := election.state.members).is_fresh:
            numbers = last.job["numbers"]
            for agent in {*last.groups[-1].ids} - {own.id}:
                self._nodes[agent] = node = Node("", 0, NO_RANK, lambda _: None, "", id=agent)
                node.become(last.info[agent])
            self._coming_by = time.monotonic() + _COMING_SECONDS
        self.membership = Membership(most, warn, randbits(40), numbers=numbers, decides=self._decides)
        self._propose()

    @property
    def is_needed(self) -> bool:
        """Whether a worker is connected, or another supervisor, whose worker may come again."""
        return bool(self._links.keys() - self._strangers.keys())

    def check_times(self) -> None:
        """Act on timeouts."""
        self._drop_slow_strangers()
        for link, node in list(self._by_link.items()):
            if self._election is not None and self._election.is_silent(node):
                self._end_link(link)
        if self._coming_by is not None and time.monotonic() > self._coming_by:
            self._coming_by = None
            here = {self._own.id, *(node.id for node in self._by_link.values())}
            self._nodes = {agent: node for agent, node in self._nodes.items() if agent in here}
            self._propose()
        before, self._checked_at = self._checked_at, time.monotonic()
        if self._checked_at > before + SILENT_SECONDS / 2:
            self.membership.wake(self._checked_at)
        self.membership.check(self._checked_at)

    def show(self, *, at_the_end: bool = False) -> None:
        """Show all workers, once a second, under --watch."""
        if self.monitor is not None:
            by_process = {(link.host, link.pid): worker for link, worker in self._workers.items()}
            self.monitor.report(by_process, self.membership.summary, at_the_end=at_the_end)

    def _refusal(self, link: Link, size: int) -> str:
        if link.purpose == FOR_AGENT and size != self._most_nodes:
            return f"it was started with --nnodes {size}, the owner of the endpoint with --nnodes {self._most_nodes}"
        return "" if link.purpose in {FOR_MEMBERS, FOR_AGENT} else "this job trains by --workers"

    def _decides(self) -> bool:
        return self._election is None or (self._is_open and self._election.has_lease())

    def _propose(self) -> None:
        """Have the nodes that are here elect the next service. The first waits for them a moment."""
        waits = self._coming_by is not None and len(self._nodes) < self._most_nodes
        if self._election is not None and not (waits and self._election.state.members.is_fresh):
            self._election.propose(list(self._nodes.values()), {"numbers": self.membership.numbers}, self._open)

    def _open(self) -> None:
        self._is_open = True

    def _admitted(self, link: Link) -> None:
        """A supervisor says who it is, and a worker says hello."""

    def _come(self, link: Link, message: dict[str, Any]) -> None:
        """Take in a supervisor that has connected; it takes part in the election."""
        address = self._address_of(link)
        node = Node(link.host, link.pid, link.rank, lambda _: None, address, id=message["id"], peer=message["peer"])
        if node.id not in self._nodes:
            self._warn(f"{node.name} has come")
        self._nodes[node.id] = self._by_link[link] = node
        assert self._election is not None
        self._election.connected(node)
        self._propose()

    def _address_of(self, link: Link) -> str:
        """How others reach the host at the other end; they may not know this host by its own addresses."""
        return self._own.address if not link.address or is_own(link.address) else link.address

    def _lost(self, link: Link) -> None:
        if (node := self._by_link.pop(link, None)) is not None and self._nodes.get(node.id) is node:
            assert self._election is not None
            self._warn(f"{node.name} has left, or cannot be reached")
            del self._nodes[node.id]
            if self.monitor is not None:
                self.monitor.forget(node.id)
            self._election.disconnected(node)
            self._propose()
        if (worker := self._workers.pop(link, None)) is not None:
            self._values.end(worker.number)
            self.membership.lost(worker, time.monotonic())

    def _serve(self, link: Link, line: str) -> None:
        try:
            message = json.loads(line)
            if link.purpose != FOR_AGENT:
                self._hear(link, message)
            elif message.get("say") == "watch":
                if self.monitor is not None:
                    self.monitor.take(self._by_link[link].id, message["place"], Row(**message["row"]))
            else:
                self._come(link, message)
        except (ValueError, KeyError, TypeError):
            self._end_link(link)

    def _hear(self, link: Link, message: dict[str, Any]) -> None:
        now, worker = time.monotonic(), self._workers.get(link)
        if message["say"] == "hello" and worker is None:
            name, numbers = f"{link.host} (pid {link.pid})", self.membership.numbers
            worker = self.membership.hello(message, name, self._address_of(link), partial(_send, link), now)
            if self.membership.numbers != numbers:
                self._propose()
            if worker is not None:
                self._workers[link] = worker
                self._values.come(worker.number, link.pid, link.host)
        elif worker is None:
            self._end_link(link)
        elif message["say"] == "ask":
            self._ask(worker, message)
        else:
            self.membership.hear(worker, message, now)

    def _ask(self, worker: Worker, message: dict[str, Any]) -> None:
        """A request to the values; those of members that have changed since are forgotten."""
        epoch = self.membership.epoch
        if message["epoch"] != epoch:
            return  # its trial has been aborted
        if self._epoch != epoch:
            self._epoch, self._values = epoch, Values()

        def answer(kind: int, content: bytes) -> None:
            worker.send({"do": "values", "epoch": epoch, "kind": kind, "content": content.hex()})

        self._values.ask(worker.number, bytes.fromhex(message["content"]), answer)


def _send(link: Link, message: dict[str, Any]) -> None:
    say(link.socket, json.dumps(message))
