"""One agent among those of a job that heals: `distopt.launch.agents.succession` with sockets, a clock and a memory."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import LaunchError, UsageError
from ...settings import Settings
from ..addresses import is_own, listen_somewhere
from ..gate import FOR_AGENT, LONGEST_CALL_SECONDS, Calling, RefusedError
from ..sockets import listen
from ..stopwatch import Stopwatch
from .memory import Memory
from .node import Node
from .options import RunOptions
from .peers import Address, Message, Peers
from .remote import Complaint, RemoteOwner
from .succession import ELECTION_SECONDS, Succession

_SAY_SECONDS = 1.0  # without an owner; then a line says which members are waited for
_BACKLOG = 64


class Election:
    """Finds the owner, elects one, or makes this agent the owner.

    Args:
        options: the command line.
        key: of all nodes.
        selector: waits for the connections.
        warn: prints a line.

    Attributes:
        host: which of the hosts of the endpoint is this one; None: none.
        state: the state machine.
    """

    def __init__(
        self, options: RunOptions, key: bytes, selector: selectors.BaseSelector, warn: Callable[[str], None]
    ) -> None:
        self._options, self._key, self._selector, self._warn = options, key, selector, warn
        self._peers = Peers(key, options.nodes, selector, self._receive, self._failed, warn)
        self._ports = Settings.from_env().ports
        own = listen_somewhere(self._ports, _BACKLOG)
        self._port = int(own.getsockname()[1])
        self._peers.listen(own)
        self._memory = Memory(key, options.endpoint, options.timeout)
        self._places = {f"@{number}": place for number, place in enumerate(options.places)}
        self._complaints: dict[str, Complaint] = {}  # of the endpoints, until any agent has answered
        self._clock = Stopwatch(LONGEST_CALL_SECONDS)  # of these
        said = self._memory.said
        for agent, info in said["members"]["info"].items() if said and said["members"] else ():
            self._places[agent] = info["address"], info["peer"]
        self.host = self._own_host()
        self.state = Succession(
            said["me"] if said else os.urandom(6).hex(),
            self._send,
            n_hosts=len(options.places),
            host=self.host,
            is_alone=options.alone,
            is_fixed=options.spare_nodes == 0 and not options.workers,
            memory=said,
            remember=self._memory.keep,
        )
        if not self.state.may_stand:
            self._complaints = {
                target: Complaint(options, place, self._clock) for target, place in self._places.items()
            }
        self._calling: Calling | None = None  # of an owner
        self._called_id = ""  # of that owner
        self._waits_since: float | None = None
        self._has_said = False

    @property
    def poll_seconds(self) -> float:
        """How soon to call `tick` again."""
        return 0.1 if self._waits_since is None else 0.03

    def tick(self) -> None:
        """Act on the time.

        Raises:
            LaunchError: this node has waited in vain.
        """
        now, state = time.monotonic(), self.state
        self._clock.seconds()
        self._peers.check_times()
        state.tick(now)
        self._memory.touch()
        if state.is_owner or state.is_led(now):
            self._waits_since, self._has_said = None, False
            return
        self._waits_since = self._waits_since or now
        if not self._has_said and now > self._waits_since + _SAY_SECONDS:
            self._has_said = True
            for text in map(str, self._complaints.values()) if state.members.is_fresh else [self._wait()]:
                self._warn(text)
        if now > self._waits_since + self._options.timeout:
            raise LaunchError(
                f"no distopt run that decides for this job has answered within {self._options.timeout:g} s"
                + ("" if state.members.is_fresh else f"; {self._wait()}")
            )

    def expects(self) -> str:
        """The future of the job without its owner, in words."""
        group = self.state.members.groups[-1]
        others = [member for member in group.ids if member != group.owner]
        if self._options.alone or group.has_quorum(others):
            return "another node takes its place"
        return "waiting for it, since the other nodes are not more than half of the last ones"

    def hello(self) -> dict[str, Any]:
        """The part of a hello that describes this agent to an owner."""
        return {"id": self.state.me, "peer": self._port}

    def has_lost(self, owner: RemoteOwner) -> bool:
        """Whether the owner that this agent reports to has ended, cannot be reached, or decides no longer."""
        now, state = time.monotonic(), self.state
        if owner.lost:
            state.link_lost(now)
        if owner.lost or state.is_owner or state.leader() not in ("", owner.agent):
            return True
        return now > owner.since + ELECTION_SECONDS and not state.is_led(now)

    def seek(self, wanted: int, reached: Callable[[socket.socket, str], None]) -> None:
        """Call the owner that is known, if any, as the node with the number `wanted`.

        `reached` gets the connection and the id of the owner, later.
        """
        lead = self.state.lead
        if self._calling is not None and lead is not None and lead["id"] != self._called_id:
            self._calling.close()  # a former owner, which may be frozen
            self._calling = None
        if self._calling is not None:
            self._calling.check_time()
        elif lead is not None:
            self._called_id = lead["id"]
            place, done = (lead["address"], lead["port"]), partial(self._called, lead["id"], reached)
            self._calling = Calling(place, self._key, FOR_AGENT, wanted, self._options.nodes, self._selector, done)

    def _called(
        self, agent: str, reached: Callable[[socket.socket, str], None], result: socket.socket | Exception
    ) -> None:
        self._calling = None
        if isinstance(result, RefusedError):
            raise LaunchError(f"the node that owns the job refuses this one: {result}")
        if isinstance(result, Exception):
            self.state.lead = None
        elif self.state.is_owner:
            result.close()
        else:
            self.state.linked()
            reached(result, agent)

    def listen(self) -> socket.socket:
        """A socket at which this agent listens as an owner."""
        listener = listen_somewhere(self._ports, _BACKLOG)
        self.state.port = int(listener.getsockname()[1])
        return listener

    # -- of an owner -----------------------------------------------------------------------------------------------
    def propose(self, nodes: list[Node], job: Message, then: Callable[[], None]) -> None:
        """Call `then` once the members may start with these nodes."""
        info = {node.id: node.to_json() for node in nodes}
        self._places |= {node.id: (node.address, node.peer) for node in nodes}
        if self.state.is_owner:
            self.state.propose(info, job, then, time.monotonic())

    def connected(self, node: Node) -> None:
        """A node reports to this agent."""
        self._places[node.id] = node.address, node.peer
        self.state.connected(node.id, time.monotonic())

    def disconnected(self, node: Node) -> None:
        """It does so no longer."""
        self.state.disconnected(node.id)

    def is_silent(self, node: Node) -> bool:
        """Whether it gives no sign of life."""
        return self.state.is_silent(node.id, time.monotonic())

    def has_lease(self) -> bool:
        """Whether it is certain that no other agent decides."""
        return self.state.has_lease(time.monotonic())

    def decides(self) -> bool:
        """Whether this agent still decides: enough members are present."""
        return self.state.decides(time.monotonic())

    def close(self, *, is_remembered: bool = False) -> None:
        """Leave the job. If it `is_remembered`, the next agent of this host takes the place of this one."""
        if self._calling is not None:
            self._calling.close()
        self._peers.close()
        self._memory.close(is_kept=is_remembered)

    # -- messages --------------------------------------------------------------------------------------------------
    def _send(self, target: str, message: Message) -> None:
        if target not in self._places and (info := self.state.members.info.get(target)) is not None:
            self._places[target] = info["address"], info["peer"]
        if (place := self._places.get(target)) is not None:
            self._peers.send(place, self._signed(message))

    def _receive(self, message: Message, address: str) -> Message | None:
        self._complaints.clear()
        self._places[message["from"]] = address, message["peer"]  # another process in its place has another port
        if (lead := message.get("lead")) and not lead["address"]:
            lead["address"] = address
        answer = self.state.receive(message, time.monotonic())
        return None if answer is None else self._signed(answer)

    def _signed(self, message: Message) -> Message:
        """The message with the port of this agent; an owner of this host is where others see this agent."""
        lead = message.get("lead")
        if lead and lead["address"] and is_own(lead["address"]):
            lead = {**lead, "address": ""}
        return {**message, "peer": self._port, **({"lead": lead} if "lead" in message else {})}

    def _failed(self, place: Address, error: Exception) -> None:
        is_refused = isinstance(error, ConnectionRefusedError)
        for target, other in list(self._places.items()):
            if other == place:
                self.state.unreachable(target, time.monotonic(), is_refused=is_refused)
                if target in self._complaints:
                    self._complaints[target].take(error)
        texts = [complaint.text for complaint in self._complaints.values()]
        if texts and all(texts):
            raise LaunchError(texts[0])

    # -- where and who ---------------------------------------------------------------------------------------------
    def _own_host(self) -> int | None:
        options = self._options
        mine = [port for host, port in options.places if is_own(host)]
        if len(set(mine)) < len(mine):
            raise UsageError(
                f"several hosts of --rdzv-endpoint {options.endpoint} are this one, at the same port; give each once"
            )
        for number, (host, port) in enumerate(options.places):
            if options.owns(host):
                with contextlib.suppress(OSError):  # another agent of this host has it, or another program
                    self._peers.listen(listen(port, options.nodes + 16))
                    return number
        return None

    def _wait(self) -> str:
        members = self.state.members
        reached, ids = self.state.reached(), members.groups[-1].ids
        names = ", ".join(f"{members.info[each]['host']} (pid {members.info[each]['pid']})" for each in reached)
        return (
            f"{len(reached)} of the last {len(ids)} nodes can be reached ({names}): waiting for more than half, or "
            "half with the owner, since the others may go on elsewhere; with --alone these would go on"
        )
