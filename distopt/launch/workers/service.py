"""The service that names the members of averages: `Membership` behind a gate, with the values by which members meet."""

from __future__ import annotations

import json
import selectors
import time
from collections.abc import Callable
from functools import partial
from secrets import randbits
from typing import Any

from ..addresses import is_own
from ..gate import FOR_AGENT, FOR_MEMBERS, Gate, Link
from ..keys import Values
from ..sockets import say
from .membership import SILENT_SECONDS, Membership, Worker


class Service(Gate):
    """The service; part of the supervisor that owns the endpoint. Supervisors of other nodes connect, too.

    Args:
        key: of the job.
        most: how many workers there can be.
        nodes: how many nodes there can be.
        address: this host, as the workers of others reach it.
        selector: waits for the connections.
        warn: prints a line.

    Attributes:
        membership: decides.
    """

    def __init__(
        self,
        key: bytes,
        most: int,
        nodes: int,
        address: str,
        selector: selectors.BaseSelector,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(key, selector)
        self._nodes, self._address, self._warn = nodes, address, warn
        self._workers: dict[Link, Worker] = {}
        self._values = Values()
        self._epoch = 0  # of these values
        self._checked_at = time.monotonic()
        self.membership = Membership(most, warn, randbits(40))

    @property
    def is_needed(self) -> bool:
        """Whether a worker is connected, or another supervisor, whose worker may come again."""
        return bool(self._links.keys() - self._strangers.keys())

    def check_times(self) -> None:
        """Act on the time."""
        self._drop_slow_strangers()
        before, self._checked_at = self._checked_at, time.monotonic()
        if self._checked_at > before + SILENT_SECONDS / 2:
            self.membership.wake(self._checked_at)
        self.membership.check(self._checked_at)

    def _refusal(self, link: Link, size: int) -> str:
        if link.purpose == FOR_AGENT and size != self._nodes:
            return f"it was started with --nnodes {size}, the owner of the endpoint with --nnodes {self._nodes}"
        return "" if link.purpose in {FOR_MEMBERS, FOR_AGENT} else "this job trains by --workers"

    def _admitted(self, link: Link) -> None:
        if link.purpose == FOR_AGENT:
            self._warn(f"{link.host} (pid {link.pid}) has come")

    def _lost(self, link: Link) -> None:
        if link.purpose == FOR_AGENT:
            self._warn(f"{link.host} (pid {link.pid}) has left")
        if (worker := self._workers.pop(link, None)) is not None:
            self._values.end(worker.number)
            self.membership.lost(worker, time.monotonic())

    def _serve(self, link: Link, line: str) -> None:
        if link.purpose == FOR_AGENT:
            return
        try:
            self._hear(link, json.loads(line))
        except (ValueError, KeyError, TypeError):
            self._end_link(link)

    def _hear(self, link: Link, message: dict[str, Any]) -> None:
        now, worker = time.monotonic(), self._workers.get(link)
        if message["say"] == "hello" and worker is None:
            host = self._address if not link.address or is_own(link.address) else link.address
            worker = self.membership.hello(message, f"{link.host} (pid {link.pid})", host, partial(_send, link), now)
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
