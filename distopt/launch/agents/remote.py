"""The owner of the endpoint, as the agent of another node sees it: calling it, and the connection."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError
from ...settings import Settings
from ..gate import FOR_AGENT, LONGEST_CALL_SECONDS, RefusedError, SilentError, StrangerError, call
from ..sockets import say
from ..stopwatch import Stopwatch
from .strangers import DIFFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from .options import RunOptions

_FOREIGN_SECONDS = 3.0  # then an agent gives up an endpoint that another program holds


class Complaint:
    """Why no owner answers at an endpoint, and whether it is in vain to call again.

    Args:
        options: the command line.
        place: host and port of the endpoint.
        clock: a stopwatch that is looked at more often than every `LONGEST_CALL_SECONDS`.

    Attributes:
        text: why it is in vain; empty as long as it is not.
    """

    def __init__(self, options: RunOptions, place: tuple[str, int], clock: Stopwatch) -> None:
        self._options, self._endpoint, self._clock = options, f"{place[0]}:{place[1]}", clock
        self._foreign_since = float("inf")  # on that clock
        self._fact, self.text = "no answer", ""

    def __str__(self) -> str:
        """The wait in words, as long as it is not in vain."""
        return f"waiting for the node that owns {self._endpoint}: {self._fact}"

    def take(self, error: Exception) -> None:
        """Note the result of a call."""
        self._fact = getattr(error, "strerror", None) or "no answer"
        self.text = self._judge(error)

    def _judge(self, error: Exception) -> str:
        timeout, now, fact = self._options.timeout, self._clock.seconds(), self._fact
        if isinstance(error, RefusedError):
            return f"{self._endpoint} refuses this node: {error}"
        if isinstance(error, socket.gaierror):
            return (
                f"the host of the endpoint {self._endpoint} cannot be found: {fact}; give a name or an address that "
                "all nodes can reach"
            )
        self._foreign_since = min(self._foreign_since, now) if isinstance(error, StrangerError) else float("inf")
        if now > self._foreign_since + _FOREIGN_SECONDS:
            return (
                f"the program at {self._endpoint} is no node of this job: {DIFFERENCE}; give all nodes the same, or "
                "another port"
            )
        if now > timeout and isinstance(error, SilentError):
            return (
                f"the program at {self._endpoint} has not answered as distopt run does within {timeout:g} s; if it is "
                "another, give all nodes another port"
            )
        if now > timeout:
            return (
                f"no distopt run answers at {self._endpoint} within {timeout:g} s ({fact}); run the same line on the "
                "node that has this address, and see whether a firewall separates them"
            )
        return ""


class Caller:
    """Calls the owner of the endpoint until it answers, or until that is in vain.

    Args:
        options: the command line.
        key: of all nodes.
        wanted: number of this node, or `NO_RANK`.
        warn: prints a line, once the owner has not answered for $DISTOPT_STALL_WARNING.
    """

    def __init__(self, options: RunOptions, key: bytes, wanted: int, warn: Callable[[str], None]) -> None:
        self._options, self._key, self._wanted, self._warn = options, key, wanted, warn
        self._warn_at = Settings.from_env().stall_warning
        self._clock = Stopwatch(LONGEST_CALL_SECONDS)
        self._complaint = Complaint(options, options.places[0], self._clock)

    def call_once(self) -> socket.socket | None:
        """A connection to the owner; None if it is to be called again.

        Raises:
            LaunchError: it refuses this node, or it is in vain to call again.
        """
        try:
            return call(self._options.places[0], self._key, FOR_AGENT, self._wanted, self._options.nodes, self._clock)
        except (RefusedError, OSError) as error:
            self._complaint.take(error)
            if self._complaint.text:
                raise LaunchError(self._complaint.text) from None
            if self._clock.seconds() > self._warn_at:
                self._warn_at = float("inf")
                self._warn(str(self._complaint))
            return None


class RemoteOwner:
    """The owner, at the other end of a connection; an `Owner` for the agent of another node.

    Args:
        link: the connection.
        name: the owner, in messages.
        agent: its id, in a job that heals.
        selector: waits for what it sends.
        inbox: gets its messages.

    Attributes:
        name: the argument.
        agent: the argument.
        lost: whether the connection has ended.
        since: when it was made, by `time.monotonic`.
    """

    def __init__(
        self, link: socket.socket, name: str, agent: str, selector: selectors.BaseSelector, inbox: deque[dict[str, Any]]
    ) -> None:
        self.name, self.agent = name, agent
        self.lost = False
        self.since = time.monotonic()
        self._link = link
        self._selector = selector
        self._inbox = inbox
        self._received = b""
        self._selector.register(link, selectors.EVENT_READ, self._read)

    def say(self, message: dict[str, Any]) -> None:
        """Send the owner a report of this agent; see `distopt.launch.agents.owner`."""
        say(self._link, json.dumps(message))

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._link.fileno() >= 0:
            self._selector.unregister(self._link)
            self._link.close()

    def _read(self) -> None:
        try:
            part = self._link.recv(1 << 16)
        except OSError:
            part = b""
        *lines, self._received = (self._received + part).split(b"\n")
        self._inbox.extend(json.loads(line) for line in lines)
        if not part:
            self.close()
            self.lost = True
