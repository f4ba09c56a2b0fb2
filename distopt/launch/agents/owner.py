"""How the agents of several nodes act as one: they meet at an endpoint, and its owner decides for all.

An agent (`distopt.launch.agents.agent`) runs on each node. The owner listens, numbers the nodes, orders all agents to
start and end their ranks, and reports how the job has ended. An agent reports to the owner when one of its ranks fails,
and when all have ended. They connect through `distopt.launch.gate`. `distopt.launch.agents` describes their messages.
In a job that heals, the agents elect the owner, and another when it is lost (`distopt.launch.agents.succession`).

A job goes through the phases of `Phase`. Where all nodes have reported the end of their ranks, `_decide` finishes the
job or starts all ranks again.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

from ...settings import Settings
from ..addresses import is_own
from ..gate import Link
from ..processes import SAVING_SECONDS
from ..sockets import say
from ..stopwatch import Stopwatch
from ..supervise.ranks import Failure, first_of
from .healing import Healing
from .node import NO_RANK, Node, Nodes
from .strangers import AgentGate

if TYPE_CHECKING:
    from .election import Election
    from .monitor import Monitor
    from .options import RunOptions
    from .succession import Members

_FAILURE_SECONDS = 1.0  # from SIGTERM to SIGKILL, after a failure
_ANSWER_SECONDS = 5.0  # then an agent that has not reported the end of its ranks counts as lost
_COMING_SECONDS = 3.0  # then another owner continues without members that have not come
_WAITING = "waiting for it, or for the same line typed on another in its place"
_LAST_CALL_SECONDS = 3.0  # after the last node has come, a job starts that can do without the others


class Phase(Enum):
    """The phases of a job. After `ENDING` comes `RUNNING`, as often as all ranks start again."""

    GATHERING = auto()  # nodes come; no rank has been started under this owner
    RUNNING = auto()
    ENDING = auto()  # a rank has failed, or all are to start again: the agents end their ranks and report that
    FINISHED = auto()  # the agents have the order to leave


class Owner(AgentGate):
    """The decisions for all nodes; part of one of the agents.

    Args:
        own: the node of this agent.
        options: its command line.
        key: of all nodes.
        selector: waits for the connections.
        warn: prints a line.

    Attributes:
        monitor: shows the rows of other nodes, under --watch.
        election: of this agent, in a job that heals on several nodes.
        modules: the modules that ranks of this agent have imported.
    """

    monitor: Monitor | None = None
    election: Election | None = None
    modules: Callable[[], Sequence[str]] = list

    def __init__(
        self,
        own: Node,
        options: RunOptions,
        key: bytes,
        selector: selectors.BaseSelector,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(key, selector, warn)
        self._own = own
        self._options = options
        self._nodes = Nodes(own, options.nodes, options.nodes - options.spare_nodes)
        self._by_link: dict[Link, Node] = {}
        self._job = f"{options.run_id}_{os.urandom(4).hex()}"
        self._salt = os.urandom(16).hex()
        self._phase = Phase.GATHERING
        self._clock = Stopwatch()
        self._came_at = 0.0  # when the last node came, on the clock
        self._say_at = Settings.from_env().stall_warning  # when to print how many nodes are missing, on the clock
        # Of the attempt, which is a start of all ranks:
        self._attempt = -1  # its number; -1: none has been started
        self._has_stepped = False  # whether it has led to a step
        self._failures: dict[int, Failure] = {}  # by rank, in the order of the reports
        self._is_killed = False  # by a second Ctrl-C
        self._newcomers = ""  # the nodes for which all ranks end and start again
        self._failed_at = 0.0  # when it began to end, on the clock
        self._end_by = float("inf")  # when nodes that have not reported the end of their ranks count as lost
        self._former: Node | None = None  # the owner whose place this one has taken
        self._coming_by = 0.0  # until when its members are expected, on the clock
        # Of healing:
        self._healing = Healing(self._nodes)
        self._cause = ""  # the last failure, until a step has been done after it

    # -- reports of agents -----------------------------------------------------------------------------------------
    def say(self, message: dict[str, Any]) -> None:
        """Act on a report of the agent of this process."""
        self.hear(self._own, message)

    def hear(self, node: Node, message: dict[str, Any]) -> None:
        """Act on a report of an agent."""
        say = message["say"]
        node.heard = Stopwatch()
        if say == "watch":
            if self.monitor is not None:
                self.monitor.take(message["row"])
        elif say == "stepped":
            self._stepped(int(message["step"]), message.get("every", 0))
        elif say == "ready":
            node.ready = True
            self._take_in()
        elif say == "gives":
            self._end_by = max(self._end_by, self._clock.seconds() + message["seconds"] + _ANSWER_SECONDS)
        else:
            node.port, node.states, node.steps = int(message["port"]), int(message.get("states", 0)), message["steps"]
            if say == "hello":
                self._hello(node, message)
            else:
                self._report(node, message)
            self._decide()

    def _stepped(self, step: int, every: int) -> None:
        if self._cause:
            seconds = self._clock.seconds() - self._failed_at
            self._warn(f"{self._cause}; {self._healing.healed(step, seconds, every)}")
        self._cause, self._has_stepped = "", True
        self._take_in()

    def _hello(self, node: Node, message: dict[str, Any]) -> None:
        before, node.most, node.away = node.most, int(message["ranks"]), False
        node.ranks, node.spare, node.attempt = node.most, message["spare"], message["attempt"]
        node.ready = message.get("ready", True)
        if before and before != node.most and not self._nodes.is_elastic:
            self._finish(2, f"{node.name} has {node.most} ranks in the place of {before}; correct the line on it")
            return
        self._came_at = self._clock.seconds()
        if self.election is not None:
            node.id, node.peer = message["id"], message["peer"]
            if node is not self._own:
                self.election.connected(node)
        if self._phase is Phase.GATHERING:
            self._begin(self._nodes.most)
        elif node.number < 0:
            self._warn(f"{node.name} has come, and takes part after the next step that a Checkpoint counts")
            if not node.ready:
                node.send({"do": "prepare", "modules": list(self.modules())})
            self._take_in()

    def _report(self, node: Node, message: dict[str, Any]) -> None:
        say = message["say"]
        node.signals = [int(signum) for signum in message["signals"]]
        for one in message["failures"]:
            failure = Failure(**one)
            # A rank that cannot start may be reported as ended, too.
            self._failures.setdefault(failure.rank, failure)
        self._is_killed |= say == "kill"
        node.ended |= say == "ended"
        if self._failures or say == "kill":
            self._end()

    def _begin(self, least: int) -> None:
        """Start all ranks for the first time under this owner, if at least `least` nodes have come."""
        if len(self._nodes) >= least and all(each.ranks for each in self._nodes):
            self._nodes.number()
            if any(any(each.steps) for each in self._nodes):  # the job continues under another owner
                self._cause = f"the node that owned the endpoint has ended; {self._own.name} has come in its place"
                self._healing.read_steps()
            self._start("")

    def _take_in(self) -> None:
        """End all ranks, to start them again with the nodes that have come, unless no step of theirs would remain."""
        new = [node for node in self._nodes if node.number < 0 and node.ranks and node.ready]
        if new and self._has_stepped and not self._failures and not any(node.ended for node in self._nodes.members):
            self._newcomers = f"{', '.join(node.name for node in new)} has come"
            self._end()

    def take_over(self, members: Members, reached: list[str]) -> None:
        """Continue the job of a former owner. Its members are about to come, and it too if it was `reached`."""
        last = members.groups[-1]
        self._job, self._attempt = members.job["name"], members.job["attempt"]
        own = self._own.host, self._own.pid  # not those of a former process in its place
        for agent in last.ids:
            node = self._own if agent == self._own.id else Node("", 0, NO_RANK, lambda _: None, "", id=agent, away=True)
            node.become(members.info[agent])
            if node is not self._own:
                self._nodes.append(node)
        former = next(node for node in self._nodes if node.id == last.owner)
        lost = f"the node that owned the job, {former.name}, has ended or cannot be reached"
        if former.id not in reached:
            self._former = former
        is_same = own == (former.host, former.pid)
        self._own.host, self._own.pid = own
        self._nodes.sort(key=lambda node: node.number)
        self._phase, self._failed_at = Phase.ENDING, self._clock.seconds()
        self._coming_by = self._failed_at + _COMING_SECONDS
        self._end_by = self._failed_at  # all have ended: those that do not come are waited for
        text = f"{lost}; {self._own.name} has taken its place"
        if is_same:
            text = f"{former.name}, which owns the job, could not reach enough of the other nodes"
        rank = self._nodes.first_rank(former)
        self._failures[rank] = Failure(rank, 1, text, is_final=True, is_of_node=True)

    def _look_for_members(self) -> None:
        """Go on without those that have not come."""
        self._coming_by = 0.0
        for node in self._nodes:
            if node.away and node is not self._former:
                failure = self._failure_of(node)
                self._failures.setdefault(failure.rank, failure)
        if self._nodes.n_present < self._nodes.least:
            self._warn(f"{next(iter(self._failures.values())).text}; {_WAITING}")
        self._decide()

    def check_times(self) -> None:
        """Act on timeouts."""
        self._drop_slow_strangers()
        if self.election is not None and self._phase is not Phase.GATHERING:
            for link, node in list(self._by_link.items()):
                if self.election.is_silent(node):
                    self._end_link(link)
        now = self._clock.seconds()  # in every phase: the clock takes a long time without a look for a suspension
        if self._phase is Phase.GATHERING:
            self._look_for_nodes(now)
        elif self._coming_by and now > self._coming_by:
            self._look_for_members()
        elif self._phase is Phase.ENDING and now > self._end_by:
            for node in [node for node in self._nodes if not node.ended]:
                self._gone(node)
            for node in self._nodes:
                if node.away and node.heard.seconds() > self._options.timeout:
                    fact = self._failures[self._nodes.first_rank(node)].text
                    self._finish(1, f"{fact}; no other has come in its place")

    def _look_for_nodes(self, now: float) -> None:
        if now > self._came_at + _LAST_CALL_SECONDS:
            self._begin(self._nodes.least)
            if self._phase is not Phase.GATHERING:
                return
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

    # -- the gate --------------------------------------------------------------------------------------------------
    def _refusal(self, link: Link, size: int) -> str:
        if self._options.heal and self._attempt >= 0 and self._has_room(link, size):
            return ""
        who, reason = f"{link.host} (pid {link.pid})", ""
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

    def _has_room(self, link: Link, size: int) -> bool:
        """Whether a job that heals takes this agent: it comes back, or in another's place, or in addition."""
        for old, node in list(self._by_link.items()):
            if (node.host, node.pid) == (link.host, link.pid):  # it has noticed before this one that it was cut off
                self._end_link(old)
        return self._place_of(link) is not None or size == self._nodes.most > max(self._nodes.least, len(self._nodes))

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
            self._end_link(link)

    def _lost(self, link: Link) -> None:
        node = self._by_link.pop(link)
        if self.election is not None:
            self.election.disconnected(node)
        if self._phase is Phase.GATHERING:  # it may come again
            self._nodes.remove(node)
        else:
            self._gone(node)

    # -- decisions -------------------------------------------------------------------------------------------------
    def _start(self, text: str) -> None:
        """Start all ranks, once the members of a job that heals have accepted that."""
        self._phase, self._coming_by = Phase.ENDING, 0.0
        # Kept states of a later attempt are newer, even if another owner has counted it.
        self._attempt = 1 + max(self._attempt, *(node.attempt for node in self._nodes))
        self._failures.clear()
        self._newcomers, self._has_stepped = "", False
        self._end_by = float("inf")
        self._nodes[:] = [node for node in self._nodes if not node.away]  # the job can do without them
        # Where none is lost or has come, each keeps its number, and its ranks what they have kept.
        if self._nodes.is_elastic and [node.number for node in self._nodes] != list(range(len(self._nodes))):
            self._nodes.number()
        if self.election is None:
            self._order(text)
        else:
            job = {"name": self._job, "attempt": self._attempt}
            self.election.propose(self._nodes, job, partial(self._order, text))

    def _order(self, text: str) -> None:
        self._phase = Phase.RUNNING
        common = {
            "do": "start",
            "text": text,
            "attempt": self._attempt,
            "size": self._nodes.n_ranks,
            "nodes": len(self._nodes),
            "job": self._job,
            "owner": self._own.name,
            "salt": self._salt,
            "address": self._nodes[0].address,
            "port": self._nodes[0].port,
        }
        for node in self._nodes:
            node.ended = False
        for node, following in zip(list(self._nodes), [*self._nodes[1:], self._nodes[0]], strict=True):
            own = {"first": self._nodes.first_rank(node), "node": node.number, "ranks": node.ranks}
            sends_states = following is not node and following.states
            node.send({**common, **own, "next": [following.address, following.states] if sends_states else None})

    def _end(self) -> None:
        """Have all agents end their ranks; a second call may only shorten the time that these get."""
        codes = [failure.code for failure in self._failures.values()]
        patience = _FAILURE_SECONDS
        if self._is_killed or any(failure.is_final for failure in self._failures.values()):
            patience = 0.0
        elif self._nodes.ending_signals or any(128 + signum in codes for signum in self._nodes.signals):
            patience = SAVING_SECONDS
        elif self._options.heal:
            patience = 0.0
        if self._phase is Phase.RUNNING:
            self._phase, self._failed_at = Phase.ENDING, self._clock.seconds()
        by = self._clock.seconds() + patience + _ANSWER_SECONDS
        if by < self._end_by:
            self._end_by = by
            gives = {"gives": True} if self._options.heal and not self._is_killed else {}
            for node in self._nodes:
                node.send({"do": "end", "patience": patience, **gives})

    def _gone(self, node: Node) -> None:
        if self._phase is Phase.FINISHED:
            return
        if node.number < 0:
            self._nodes.remove(node)
            return
        node.ended = True
        failure = self._failure_of(node)
        self._failures[failure.rank] = failure
        if self._options.heal:
            node.away, node.send, node.heard = True, lambda _: None, Stopwatch()
            cure = _WAITING
            decides = self.election is None or self.election.decides()
            if (left := self._nodes.n_present) >= self._nodes.least and decides:
                cure = f"continuing with {left} of {self._nodes.most} nodes"
            self._warn(f"{failure.text}; {cure}")
        self._end()
        self._decide()

    def _failure_of(self, node: Node) -> Failure:
        rank = self._nodes.first_rank(node)
        last = rank + node.ranks - 1
        ranks = f"rank {rank}" if rank == last else f"ranks {rank} to {last}"
        text = f"node {node.number} ({ranks}), {node.name}, has ended or cannot be reached; see its output"
        return Failure(rank, 1, text, is_final=True, is_of_node=True)

    def _decide(self) -> None:
        """Finish the job or start it again, if all ranks have ended, and the nodes that it needs are not away."""
        if self._phase is Phase.FINISHED or not all(node.ended for node in self._nodes):
            return
        if self._coming_by and any(node.away and node is not self._former for node in self._nodes):
            return
        lacks = self._nodes.n_present < min(self._nodes.least, len(self._nodes))
        if lacks and not self._nodes.ending_signals:
            return
        if not self._failures:
            self._finish(0, "")
            return
        first = first_of(self._failures.values(), between_hosts=len(self._nodes) > 1)
        if self._nodes.ending_signals or first.code - 128 in self._nodes.signals:
            self._finish_by_signal(first)
        elif self._newcomers and first.is_consequence:
            self._start_again(self._newcomers)
        elif self._options.heal and self._healing.can_mend(first):
            starts_again, text = self._healing.judge(first)
            if starts_again:  # the failure may be one of peers that have been ended for newcomers
                self._start_again("; ".join(filter(None, (self._newcomers, text))))
            else:
                self._finish(first.code, text)
        elif first.is_final or self._attempt >= self._options.restarts:
            self._finish(first.code, first.text)
        else:
            again = f"starting all ranks again ({self._attempt + 1} of {self._options.restarts})"
            self._start(f"{first.text}; {again}")

    def _finish_by_signal(self, first: Failure) -> None:
        """Say that a signal has ended the job, or which rank has failed of its own after one had come."""
        cure = "; to take out one node, end its distopt run by SIGKILL" if self._nodes.is_elastic else ""
        by_signal = [signum for signum in self._nodes.signals if first.code == 128 + signum]
        if not by_signal and first.is_consequence:
            by_signal = self._nodes.ending_signals
        if by_signal:
            total = self._nodes.n_ranks
            ended = "the rank has" if total == 1 else f"all {total} ranks have"
            self._finish(128 + by_signal[0], f"{signal.Signals(by_signal[0]).name}: {ended} ended{cure}")
        else:
            self._finish(first.code, f"{first.text}{cure}")

    def _start_again(self, cause: str) -> None:
        self._healing.read_steps()
        self._start(f"{self._cause}; no step was done since" if self._cause else "")
        self._cause = cause

    def _finish(self, code: int, text: str) -> None:
        if self._phase is not Phase.FINISHED:
            self._phase = Phase.FINISHED
            for node in list(self._nodes):
                node.send({"do": "finish", "code": code, "text": text})
