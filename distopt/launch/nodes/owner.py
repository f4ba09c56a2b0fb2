"""How the agents of several nodes act as one: they meet at an endpoint, and its owner decides for all.

An agent (`distopt.launch.nodes.agent`) runs on each node. The owner of the endpoint listens, numbers the nodes, orders
all agents to start and end their ranks, and reports how the job has ended. An agent reports to the owner when one of
its ranks fails, and when all have ended. They connect through `distopt.launch.gate`. `distopt.launch.nodes`
describes their messages.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...settings import Settings
from ..addresses import is_own
from ..gate import Gate, Link
from ..processes import ENDING_SIGNALS, SAVING_SECONDS
from ..sockets import say
from ..stopwatch import Stopwatch
from ..supervise.ranks import Failure, first_of
from .node import NO_RANK, Node, Nodes

if TYPE_CHECKING:
    from .options import RunOptions
    from .watch import Monitor

_FAILURE_SECONDS = 1.0  # from SIGTERM to SIGKILL, after a failure
_ANSWER_SECONDS = 5.0  # then an agent that has not reported the end of its ranks counts as lost
BEAT_SECONDS = 0.3  # between two signs of life of an agent that heals
SILENT_SECONDS = 1.2  # then an agent without a sign of life counts as cut off
_SIGNALLED = 128  # the exit code of a rank that signal n has ended is 128 + n
_LAST_CALL_SECONDS = 3.0  # after the last node has come, a job starts that can do without the others
_MOST_ATTEMPTS = 5  # attempts of healing without a new step


class Owner(Gate):
    """The decisions for all nodes; part of one of the agents.

    Args:
        own: the node of this agent.
        options: its command line.
        key: the secret of all nodes.
        selector: waits for the connections.
        warn: prints a line.

    Attributes:
        monitor: shows the rows of other nodes, under --watch.
    """

    monitor: Monitor | None = None

    def __init__(
        self,
        own: Node,
        options: RunOptions,
        key: bytes,
        selector: selectors.BaseSelector,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(key, selector)
        self._own = own
        self._options = options
        self._warn = warn
        self._nodes = Nodes(own, options.nodes, options.nodes - options.spare_nodes)
        self._by_link: dict[Link, Node] = {}
        self._job = f"{options.run_id}_{os.urandom(4).hex()}"
        self._salt = os.urandom(16).hex()
        self._attempt = -1  # -1: none has been started
        self._failures: dict[int, Failure] = {}  # by rank, in the order of the reports
        self._killed = False
        self._clock = Stopwatch()
        self._end_by = float("inf")  # on that clock
        self._finished = False
        self._warned = False
        self._came_at = 0.0  # when the last node came, on the clock
        self._has_stepped = False  # whether this attempt has led to a step
        self._newcomers = ""  # the nodes for which all ranks end and start again
        self._say_at = Settings.from_env().stall_warning  # when to print how many nodes are missing, on the clock
        self._healed: list[tuple[int, str]] = []  # the last step and the reason of each restart since a new step
        self._failed_at = 0.0  # on the clock
        self._cause = ""  # the last failure, until a step has been done after it

    # -- reports of agents -----------------------------------------------------------------------------------------
    def say(self, message: dict[str, Any]) -> None:
        """Local. Act on a report of the agent of this process."""
        self.hear(self._own, message)

    def hear(self, node: Node, message: dict[str, Any]) -> None:
        """Local. Act on a report of an agent."""
        say = message["say"]
        node.heard = Stopwatch()
        if say == "beat":
            if node is self._own:
                self._beat()
        elif say == "watch":
            if self.monitor is not None:
                self.monitor.take(message["row"])
        elif say == "stepped":
            self._stepped(int(message["step"]))
        else:
            node.port, node.steps = int(message["port"]), message["steps"]
            if say == "hello":
                self._hello(node, message)
            else:
                self._report(node, message)
            if not self._finished and all(each.ended for each in self._nodes):
                self._decide()

    def _stepped(self, step: int) -> None:
        if self._cause:
            seconds = self._clock.seconds() - self._failed_at
            self._warn(f"{self._cause}; healed: step {step} was done after {seconds:.2f} s")
        self._cause, self._has_stepped = "", True
        self._take_in()

    def _hello(self, node: Node, message: dict[str, Any]) -> None:
        before, node.most, node.away = node.most, int(message["ranks"]), False
        node.ranks, node.spare, node.attempt = node.most, message["spare"], message["attempt"]
        if before and before != node.most and not self._nodes.is_elastic:
            self._finish(2, f"{node.name} has {node.most} ranks in the place of {before}; correct the line on it")
            return
        self._came_at = self._clock.seconds()
        if self._attempt < 0:
            self._begin(self._nodes.most)
        elif node.number < 0:
            self._warn(f"{node.name} has come, and takes part after the next step that a Checkpoint counts")
            self._take_in()

    def _report(self, node: Node, message: dict[str, Any]) -> None:
        say = message["say"]
        node.signals = [int(signum) for signum in message["signals"]]
        for one in message["failures"]:
            failure = Failure(**one)
            # A rank that cannot start may be reported as ended, too.
            self._failures.setdefault(failure.rank, failure)
        self._killed |= say == "kill"
        node.ended |= say == "ended"
        if self._failures or say == "kill":
            self._end()

    def _begin(self, least: int) -> None:
        """Start all ranks for the first time under this owner, if so many nodes have come."""
        if len(self._nodes) >= least and all(each.ranks for each in self._nodes):
            self._nodes.number()
            if any(any(each.steps) for each in self._nodes):  # the job continues under another owner
                self._cause = f"the node that owned the endpoint has ended; {self._own.name} has come in its place"
            self._start("")

    def _take_in(self) -> None:
        """End all ranks, to start them again with the nodes that have come, unless no step of theirs would remain."""
        new = [node for node in self._nodes if node.number < 0 and node.ranks]
        if new and self._has_stepped and not self._failures and not any(node.ended for node in self._nodes.members):
            self._newcomers = f"{', '.join(node.name for node in new)} has come"
            self._end()

    def _beat(self) -> None:
        """Give all other nodes a sign of life, and look for theirs."""
        for link, node in list(self._by_link.items()):
            node.send({"do": "beat"})
            if self._attempt >= 0 and node.heard.seconds() > SILENT_SECONDS:
                self._drop(link)
                self._lost(link)

    def look(self) -> None:
        """Local. Act on timeouts."""
        self._drop_slow_strangers()
        now = self._clock.seconds()
        if self._attempt < 0 and now > self._came_at + _LAST_CALL_SECONDS:
            self._begin(self._nodes.least)
        if self._attempt < 0:
            came = f"{len(self._nodes)} of {self._nodes.most} nodes have come: {self._nodes.names}"
            if now > self._options.timeout:
                self._finish(
                    2,
                    f"{came}; within {self._options.timeout:g} s no other has. Run the same line on every node, with "
                    "the same endpoint, and see whether a firewall separates them",
                )
            elif now > self._say_at:
                self._say_at = float("inf")
                self._warn(f"waiting for the other nodes: {came}")
        elif now > self._end_by:
            for node in [node for node in self._nodes if not node.ended]:
                self._gone(node)
            for node in self._nodes:
                if node.away and node.heard.seconds() > self._options.timeout:
                    self._finish(
                        1, f"{self._failures[self._nodes.first_rank(node)].text}; no other has come in its place"
                    )

    # -- the gate --------------------------------------------------------------------------------------------------
    def _refusal(self, link: Link, size: int) -> str:
        who = f"{link.host} (pid {link.pid})"
        if self._options.heal and self._attempt >= 0:
            for old, node in list(self._by_link.items()):
                # The agent has noticed before this one that it was cut off.
                if (node.host, node.pid) == (link.host, link.pid):
                    self._drop(old)
                    self._lost(old)
            if self._place_of(link) is not None or (
                size == self._nodes.most > max(self._nodes.least, len(self._nodes))
            ):
                return ""
        reason = ""
        if size != self._nodes.most:
            reason = f"{who} was started with --nnodes {size}, {self._own.name} with --nnodes {self._nodes.most}"
        elif link.rank != NO_RANK and link.rank in [node.wanted for node in self._nodes]:
            reason = f"{who} was started with --node-rank {link.rank}, and so was another node"
        if self._attempt >= 0 or len(self._nodes) == self._nodes.most:
            full = (
                f"the job {self._options.run_id!r} there has its {self._nodes.most} nodes already: {self._nodes.names}"
            )
            return (reason if self._nodes.is_elastic else "") or full
        if reason:
            self._finish(2, f"{reason}; correct the line on one of them")
        return reason

    def _admitted(self, link: Link) -> None:
        def send(message: dict[str, Any]) -> None:
            say(link.socket, json.dumps(message))

        # Two hosts may have the same name. Other nodes may not know this host by its own addresses.
        address = self._own.address if is_own(link.address) else link.address
        node = self._place_of(link)
        if node is None:
            node = Node(link.host, link.pid, link.rank, send, address, ended=self._attempt >= 0)
            self._nodes.append(node)
        else:
            node.host, node.pid, node.send, node.address = link.host, link.pid, send, address
        self._by_link[link] = node

    def _place_of(self, link: Link) -> Node | None:
        """The absent node that the agent at the other end is, or replaces."""
        away = [node for node in self._nodes if node.away and node not in self._by_link.values()]
        away = [node for node in away if link.rank in {NO_RANK, node.number}]
        away.sort(key=lambda node: (node.host, node.pid) != (link.host, link.pid))
        return away[0] if away else None

    def _serve(self, link: Link, line: str) -> None:
        try:
            self.hear(self._by_link[link], json.loads(line))
        except (ValueError, KeyError, TypeError):
            self._drop(link)
            self._lost(link)

    def _lost(self, link: Link) -> None:
        node = self._by_link.pop(link)
        if self._attempt < 0:  # it may come again
            self._nodes.remove(node)
        else:
            self._gone(node)

    def _turned_away(self, link: Link) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"turned away a connection from {link.address} that is not a node of this job: it has another "
                "--rdzv-id or DISTOPT_JOB_SECRET, or is not distopt run"
            )

    # -- decisions -------------------------------------------------------------------------------------------------
    def _start(self, text: str) -> None:
        # Kept states of a later attempt are newer, even if another owner has counted it.
        self._attempt = 1 + max(self._attempt, *(node.attempt for node in self._nodes))
        self._failures.clear()
        self._newcomers, self._has_stepped = "", False
        self._end_by = float("inf")
        self._nodes[:] = [node for node in self._nodes if not node.away]  # the job can do without them
        if self._nodes.is_elastic:
            self._nodes.number()
        first, total = 0, sum(node.ranks for node in self._nodes)
        common = {
            "do": "start",
            "text": text,
            "attempt": self._attempt,
            "size": total,
            "nodes": len(self._nodes),
            "job": self._job,
            "owner": self._own.name,
            "salt": self._salt,
            "address": self._nodes[0].address,
            "port": self._nodes[0].port,
        }
        for node in self._nodes:
            node.ended = False
        for node in list(self._nodes):
            node.send({**common, "first": first, "node": node.number, "ranks": node.ranks})
            first += node.ranks

    def _end(self) -> None:
        patience = 0.0 if self._options.heal else _FAILURE_SECONDS
        codes = [failure.code for failure in self._failures.values()]
        if self._killed or any(failure.is_final for failure in self._failures.values()):
            patience = 0.0
        elif any(signum in ENDING_SIGNALS or 128 + signum in codes for signum in self._nodes.signals):
            patience = SAVING_SECONDS
        if self._end_by == float("inf"):
            self._failed_at = self._clock.seconds()
        by = self._clock.seconds() + patience + _ANSWER_SECONDS
        if by < self._end_by:
            self._end_by = by
            for node in self._nodes:
                node.send({"do": "end", "patience": patience})

    def _gone(self, node: Node) -> None:
        if self._finished:
            return
        if node.number < 0:
            self._nodes.remove(node)
            return
        node.ended = True
        rank = self._nodes.first_rank(node)
        last = rank + node.ranks - 1
        ranks = f"rank {rank}" if rank == last else f"ranks {rank} to {last}"
        text = f"node {node.number} ({ranks}), {node.name}, has ended or cannot be reached; see its output"
        self._failures[rank] = Failure(rank, 1, text, is_final=True, is_of_node=True)
        if self._options.heal:
            node.away, node.send, node.heard = True, lambda _: None, Stopwatch()
            self._warn(f"{text}; {self._cure}")
        self._end()
        if all(each.ended for each in self._nodes):
            self._decide()

    @property
    def _cure(self) -> str:
        left = self._nodes.n_present
        if left >= self._nodes.least:
            return f"continuing with {left} of {self._nodes.most} nodes"
        return "waiting for it, or for the same line typed on another in its place"

    def _decide(self) -> None:
        """Finish the job or start it again: all ranks have ended, and each node that is not away can start them."""
        lacks = self._nodes.n_present < min(self._nodes.least, len(self._nodes))
        if lacks and not any(signum in ENDING_SIGNALS for signum in self._nodes.signals):
            return
        if not self._failures:
            self._finish(0, "")
            return
        first = first_of(self._failures.values(), between_hosts=len(self._nodes) > 1)
        total = sum(node.ranks for node in self._nodes)
        cure = "; to take out one node, end its distopt run by SIGKILL" if self._nodes.is_elastic else ""
        by_signal = [signum for signum in self._nodes.signals if first.code == 128 + signum]
        if first.is_consequence and not by_signal:
            by_signal = [signum for signum in self._nodes.signals if signum in ENDING_SIGNALS]
        if by_signal:
            ended = "the rank has" if total == 1 else f"all {total} ranks have"
            self._finish(128 + by_signal[0], f"{signal.Signals(by_signal[0]).name}: {ended} ended{cure}")
        elif any(signum in ENDING_SIGNALS for signum in self._nodes.signals):
            self._finish(first.code, f"{first.text}{cure}")
        elif self._newcomers and first.is_consequence:
            self._start_again(self._newcomers)
        elif self._options.heal and (first.is_of_node or not first.is_final or self._spare(first)):
            self._heal(first)
        elif first.is_final or self._attempt >= self._options.restarts:
            self._finish(first.code, first.text)
        else:
            again = f"starting all ranks again ({self._attempt + 1} of {self._options.restarts})"
            self._start(f"{first.text}; {again}")

    def _heal(self, first: Failure) -> None:
        """Start all ranks again, unless they keep failing at the same step."""
        # An agent without --heal reports no steps.
        steps = [step for node in self._nodes for step in (node.steps or [0] * node.ranks)[: node.ranks]]
        step = max(steps) if first.is_of_node else steps[first.rank]
        if self._healed and step > self._healed[-1][0]:
            self._healed.clear()
            for node in self._nodes:  # ranks that kept failing get another chance
                node.ranks = node.most
        text = re.sub(r" \(pid \d+\)|; flight record in \S+", "", first.text)
        if (short := self._spare(first)) is not None and (first.is_final or (step, text) in self._healed):
            short.ranks -= 1
            self._healed = [(step, "")]
            self._start_again(f"{first.text}; continuing with {short.ranks} of {short.most} ranks on {short.name}")
        elif (step, text) in self._healed and first.code < _SIGNALLED and not first.is_of_node:
            self._finish(first.code, f"{first.text}; so it did before, after step {step}")
        elif len(self._healed) == _MOST_ATTEMPTS:
            self._finish(first.code, f"{first.text}; {_MOST_ATTEMPTS} attempts have led to no step after {step}")
        else:
            self._healed.append((step, text))
            self._start_again(first.text)

    def _start_again(self, cause: str) -> None:
        self._start(f"{self._cause}; no step was done since" if self._cause else "")
        self._cause = cause

    def _spare(self, first: Failure) -> Node | None:
        """The node of a rank that has been killed or cannot be started, if the node may do without it."""
        if first.is_of_node or not (first.code >= _SIGNALLED or first.is_final):
            return None
        node = max(
            (node for node in self._nodes.members if self._nodes.first_rank(node) <= first.rank),
            key=self._nodes.first_rank,
        )
        return node if node.ranks > node.most - node.spare else None

    def _finish(self, code: int, text: str) -> None:
        if not self._finished:
            self._finished = True
            for node in list(self._nodes):
                node.send({"do": "finish", "code": code, "text": text})
