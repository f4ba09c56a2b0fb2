"""The owner of the endpoint, as the agent of another node sees it: calling it, and the connection."""

from __future__ import annotations

import json
import selectors
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError
from ..gate import FOR_AGENT, LONGEST_CALL_SECONDS, RefusedError, SilentError, StrangerError, call
from ..sockets import say
from ..stopwatch import Stopwatch

if TYPE_CHECKING:
    from .options import RunOptions

_FOREIGN_SECONDS = 3.0  # then an agent gives up an endpoint that another program holds


class Caller:
    """Calls the owner until it answers, or until that is in vain.

    Args:
        options: the command line.
        key: of all nodes.
        wanted: number of this node, or `NO_RANK`.
        is_first: whether this node has not met the owner before; later, names may fail with the network.
    """

    def __init__(self, options: RunOptions, key: bytes, wanted: int, *, is_first: bool) -> None:
        self._options, self._key, self._wanted, self._is_first = options, key, wanted, is_first
        self._clock = Stopwatch(LONGEST_CALL_SECONDS)
        self._foreign_since = float("inf")  # on that clock

    def call_once(self, seconds: float) -> socket.socket | None:
        """A connection to the owner; None if it is to be called again.

        Args:
            seconds: how long the connection may take.

        Raises:
            LaunchError: it refuses this node, or it is in vain to call again.
        """
        options, address = self._options, (self._options.host, self._options.port)
        try:
            return call(address, self._key, FOR_AGENT, self._wanted, options.nodes, self._clock, seconds)
        except RefusedError as error:
            raise LaunchError(f"{options.endpoint} refuses this node: {error}") from None
        except OSError as error:
            fact, now = error.strerror or "no answer", self._clock.seconds()
            if isinstance(error, socket.gaierror) and self._is_first:
                raise LaunchError(
                    f"the host of the endpoint {options.endpoint} cannot be found: {fact}; give a name or an address "
                    "that all nodes can reach"
                ) from None
            self._foreign_since = min(self._foreign_since, now) if isinstance(error, StrangerError) else float("inf")
            if now > self._foreign_since + _FOREIGN_SECONDS:
                raise LaunchError(
                    f"the program at {options.endpoint} is no node of this job: it has another --rdzv-id or "
                    "DISTOPT_JOB_SECRET, or is not distopt run; give all nodes the same, or another port"
                ) from None
            if now > options.timeout and isinstance(error, SilentError):
                raise LaunchError(
                    f"the program at {options.endpoint} has not answered as distopt run does within "
                    f"{options.timeout:g} s; if it is another, give all nodes another port"
                ) from None
            if now > options.timeout:
                raise LaunchError(
                    f"no distopt run answers at {options.endpoint} within {options.timeout:g} s ({fact}); run the same "
                    "line on the node that has this address, and see whether a firewall separates them"
                ) from None
            return None


class RemoteOwner:
    """The owner, at the other end of a connection; an `Owner` for the agent of another node.

    Args:
        link: the connection.
        name: the owner, in messages.
        selector: waits for what it sends.
        inbox: gets its messages.

    Attributes:
        name: the argument.
        lost: whether the connection has ended.
        heard: since its last message.
    """

    def __init__(
        self, link: socket.socket, name: str, selector: selectors.BaseSelector, inbox: deque[dict[str, Any]]
    ) -> None:
        self.name = name
        self.lost = False
        self.heard = Stopwatch()
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
        self.heard = Stopwatch()
        if not part:
            self.close()
            self.lost = True
