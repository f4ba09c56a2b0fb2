"""`distopt run` on one node: starts the ranks of this node, and ends them together with the ranks of other nodes.

An agent has one thread and waits for signals, for output and ends of its ranks, and for the owner of the endpoint
(`distopt.launch.agents.owner`). On one node, it is its own owner, and listens nowhere. It starts fast: without NumPy.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections import deque
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError, UsageError
from ...settings import Settings
from ..addresses import PORTS_TAKEN, listen_somewhere
from ..launchers.distopt_run import DISTOPT_RUN
from ..processes import ENDING_SIGNALS, PASSED_ON_SIGNALS, SAVING_SECONDS, caught_signals, waitable_children
from ..sockets import handle_events, is_free, listen
from ..stopwatch import Stopwatch
from ..supervise.program import Program
from ..supervise.ranks import Failure, LocalRanks, starting
from ..supervise.screen import Streams
from .node import NO_RANK, Node
from .owner import Owner
from .remote import Caller, RemoteOwner
from .variables import common_variables, variables
from .warm import WarmStart

if TYPE_CHECKING:
    from .election import Election
    from .monitor import Monitor
    from .options import RunOptions

_RETRY_SECONDS = 0.03  # pause before the next call of an owner that was absent
_LOOK_SECONDS = 0.3  # between two looks at the ranks, if nothing happens
_KILLING = 2  # the Ctrl-C that kills; the next one does not even wait for the other nodes


def run(options: RunOptions) -> int:
    """Collective over the nodes. Run this node's part of the job to its end; return the exit code.

    The code comes from the first rank that failed; it is 128 + n if signal n ended that rank or the job. One line says
    why the job has failed.

    Raises:
        LaunchError: the nodes do not find each other.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(waitable_children())
        caught, wake = stack.enter_context(caught_signals(PASSED_ON_SIGNALS, last=True))
        # The kernel sends SIGCHLD when a rank is stopped.
        _, child = stack.enter_context(caught_signals([signal.SIGCHLD] if options.heal else [], last=True))
        selector = stack.enter_context(selectors.DefaultSelector())
        agent = _Agent(options, caught, selector)
        stack.callback(agent.close)
        for fd in (wake, child):
            selector.register(fd, selectors.EVENT_READ, partial(os.read, fd, 4096))
        return agent.run()


class _Agent:
    def __init__(self, options: RunOptions, caught: list[int], selector: selectors.BaseSelector) -> None:
        self._options = options
        self._caught = caught  # signals that have not been acted on
        self._signals: list[int] = []  # those that have been
        self._selector = selector
        self._streams = Streams(selector, "distopt run", table=options.watch == "table")
        self._print = self._streams.print
        self._monitor: Monitor | None = None
        if options.watch:
            from .monitor import Display, Monitor

            self._monitor = Monitor(Display(options.watch, self._streams.outputs[1]), socket.gethostname())
        self._held = self._hold_port()  # reserves the port of PyTorch's store, where rank 0 listens seconds later
        self._key = options.key
        self._owner: Owner | RemoteOwner | None = None
        self._inbox: deque[dict[str, Any]] = deque()  # orders of the owner
        wanted = NO_RANK if options.node_rank is None else options.node_rank
        self._me = Node(socket.gethostname(), os.getpid(), wanted, self._inbox.append, options.host)
        self._warm: WarmStart | None = None
        if options.heal:
            listener = None
            if options.nodes > 1:
                listener = listen_somewhere(Settings.from_env().ports, options.nodes + 16)
            self._warm = WarmStart(options, selector, self._print, self._key, listener)
        self._election: Election | None = None
        self._term = -1  # in which this agent is the owner
        if options.heal and options.nodes > 1:
            from .election import Election

            self._election = Election(options, self._key, selector, self._print)
            if (host := self._election.host) is not None:
                self._me.address = options.places[host][0]
        self._ranks: LocalRanks | None = None
        self._common: dict[str, str] = {}  # environment of the ranks
        self._pending: dict[str, Any] | None = None  # the order to start, while the process that forks ranks imports
        self._attempt = -1  # the last one that this agent was part of
        self._prepares = False  # while the job continues
        self._reported = 0  # failures that the owner knows
        self._ended = False  # the owner knows that all ranks have ended
        self._clock = Stopwatch()
        self._kill_at = float("inf")  # on that clock
        self._code: int | None = None  # of this process, once it is to leave

    def run(self) -> int:
        """Collective over the nodes. Obey the owner until the job has ended; the exit code."""
        if self._election is None:
            self._find_owner()
        while self._code is None:
            polled = (self._warm, self._election)
            seconds = min([_LOOK_SECONDS, *(part.poll_seconds for part in polled if part is not None)])
            handle_events(self._selector, 0.0 if self._inbox else seconds)
            self._handle_signals()
            if isinstance(self._owner, Owner):
                self._owner.check_times()
            while self._inbox and self._code is None:
                self._obey(self._inbox.popleft())
            if self._code is None:
                self._follow()
                self._start_pending()
                self._say_ready()
            self._look_at_ranks()
            self._show_ranks()
        return self._code

    def close(self) -> None:
        """Kill ranks that still run, and write the output that waits for a reader."""
        for part in (self._ranks, self._warm, self._owner, self._election):
            if part is not None:
                part.close()
        self._streams.close(lambda: bool(self._code or self._caught or self._ending))
        self._held.close()

    # -- meeting ---------------------------------------------------------------------------------------------------
    def _find_owner(self) -> None:
        options = self._options
        listener = None
        if options.nodes > 1 and options.owns(options.host):
            with contextlib.suppress(OSError):  # another agent of this host owns it, or another program
                listener = listen(options.port, options.nodes + 16)
        if options.nodes == 1 or listener is not None:
            self._own_job(listener)
            return
        caller = Caller(options, self._key, self._me.wanted, self._print)
        link: socket.socket | None = None
        while link is None and self._code is None:
            if (link := caller.call_once()) is None:
                handle_events(self._selector, _RETRY_SECONDS)
                self._handle_signals()
        if link is not None:
            self._report_to(f"the node that owns {options.endpoint}", link)

    def _own_job(self, listener: socket.socket | None) -> None:
        """Decide for all nodes from now on."""
        self._owner = owner = Owner(self._me, self._options, self._key, self._selector, self._print)
        owner.monitor, owner.election = self._monitor, self._election
        if self._warm is not None:
            owner.modules = partial(getattr, self._warm, "modules")
        if listener is not None:
            owner.listen(listener)
        self._me.number = -1
        if self._election is not None:
            state = self._election.state
            self._term, self._me.id = state.term, state.me
            if not state.members.is_fresh:
                owner.take_over(state.members, state.reached())
        self._hello()

    def _report_to(self, name: str, link: socket.socket, agent: str = "") -> None:
        self._owner = RemoteOwner(link, name, agent, self._selector, self._inbox)
        self._hello()

    def _follow(self) -> None:
        """Notice the loss of the owner. In a job that heals, find another, or become it."""
        owner, election = self._owner, self._election
        if election is None:
            if isinstance(owner, RemoteOwner) and owner.lost:
                owner.close()
                self._owner = None
                self._print(f"{owner.name} has ended or cannot be reached; see its output")
                self._code = 1
            return
        state = election.state
        try:
            election.tick()
        except LaunchError as error:
            if self._ranks is None:
                raise
            self._print(str(error))
            self._code = 1
        if isinstance(owner, Owner) and not (state.is_owner and state.term == self._term):
            self._leave(
                owner, f"{self._me.name} decides no longer: it cannot reach enough of the other nodes, or another does"
            )
        elif isinstance(owner, RemoteOwner) and election.has_lost(owner):
            self._leave(owner, f"{owner.name} has ended or cannot be reached; {election.expects()}")
        if self._owner is None and self._ranks is not None and self._ranks.running:
            return  # they are giving their live states, and end
        if self._owner is None and state.is_owner:
            self._own_job(election.listen())
        elif self._owner is None:
            election.seek(self._me.wanted, partial(self._report_to, f"the node that owns {self._options.endpoint}"))

    def _leave(self, owner: Owner | RemoteOwner, text: str) -> None:
        """Obey this owner no longer, and end the ranks that it has started."""
        owner.close()
        self._owner = None
        self._inbox.clear()
        self._pending = None
        if self._ranks is not None:
            self._print(text)
            self._ranks.poll()
            self._give()

    # -- orders of the owner ---------------------------------------------------------------------------------------
    def _hello(self) -> None:
        own = self._election.hello() if self._election is not None else {}
        options = self._options
        if self._warm is not None:
            own["ready"] = self._warm.server is not None and not self._warm.server.is_importing
        self._say("hello", ranks=options.ranks, spare=options.spare_ranks, attempt=self._attempt, **own)

    def _say(self, say: str, **content: Any) -> None:
        before, self._held = self._held, self._hold_port()  # every attempt gets another
        before.close()
        port = (self._options.port if self._options.nodes == 1 else 0) or self._held.getsockname()[1]
        steps = self._warm.state_slots.steps if self._warm is not None else []
        receiver = self._warm.receiver if self._warm is not None else None
        states = 0 if receiver is None else receiver.port
        message = {"say": say, "port": port, "states": states, "steps": steps, **content}
        if self._owner is not None:
            self._owner.say(message)

    def _hold_port(self) -> socket.socket:
        """A socket that reserves a free port: the kernel gives it to no other; a server with SO_REUSEADDR can listen.

        Raises:
            LaunchError: all of `DISTOPT_PORTS` are taken.
        """
        port, allowed = 0, Settings.from_env().ports
        if allowed is not None and self._options.nodes > 1:
            # Backwards: ranks and their server look for theirs from other ends.
            free = next(filter(is_free, reversed(allowed)), None)
            if free is None:
                raise LaunchError(PORTS_TAKEN)
            port = free
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", port))
        return holder

    def _obey(self, message: dict[str, Any]) -> None:
        do = message["do"]
        if do == "finish":
            self._show_ranks(at_the_end=True)
        if text := message.get("text"):
            self._print(text)
        if do == "prepare" and self._warm is not None:
            self._prepares = True
            self._warm.prepare_ahead(common_variables(self._options), message["modules"])
        elif do == "start":
            self._pending, self._prepares = message, False
            self._start_pending()
        elif do == "end" and self._pending is not None:
            self._pending = None
            self._say("ended", failures=[], signals=self._signals)
        elif do == "end" and self._ranks is not None:
            self._streams.make_room()
            if message["patience"]:
                if not self._ending:  # else it was passed on to the ranks
                    self._ranks.terminate()
                self._kill_at = min(self._kill_at, self._clock.seconds() + message["patience"])
            elif "gives" in message:
                self._give()
            else:
                self._ranks.kill()
        elif do == "finish":
            self._code = int(message["code"])

    def _give(self) -> None:
        """Have the ranks give their live states, and end each that has."""
        if self._ranks is not None and self._warm is not None:
            seconds = self._warm.ask(self._ranks)
            if self._owner is not None:
                self._owner.say({"say": "gives", "seconds": seconds})

    def _start_pending(self) -> None:
        """Start the ranks as ordered, warm if that takes only the rest of an import, unless a signal ends the job."""
        if self._pending is not None and (self._ending or self._warm is None or not self._warm.is_worth_waiting_for()):
            order, self._pending = self._pending, None
            self._start(order)

    def _say_ready(self) -> None:
        """Report to the owner that ranks would start warm, or that there is nothing to wait for."""
        if self._prepares and (self._warm is None or not self._warm.is_worth_waiting_for()):
            self._prepares = False
            if self._owner is not None:
                self._owner.say({"say": "ready"})

    def _start(self, order: dict[str, Any]) -> None:
        self._ranks = ranks = self._ranks or LocalRanks(self._selector)
        ranks.release()
        ranks.failures.clear()
        _reap()
        if isinstance(self._owner, RemoteOwner):
            owned = "the job" if self._election is not None else self._options.endpoint
            self._owner.name = f"the node that owns {owned}, {order['owner']},"
        if self._monitor is not None:
            self._monitor.forget(order["size"])
        self._attempt, self._reported, self._ended, self._kill_at = order["attempt"], 0, False, float("inf")
        if self._ending:  # it came while no rank ran
            ranks.failures.append(Failure(order["first"], 128 + self._ending[0], "", is_consequence=True))
            return
        options = self._options
        self._common = variables(order, options, self._key)
        if self._warm is not None:
            self._warm.start(order)
            self._common |= self._warm.state_slots.variable
        try:
            for local_rank in range(order["ranks"]):
                rank = order["first"] + local_rank
                folder = (options.log_dir or Path()) / order["job"] / f"attempt_{order['attempt']}" / str(rank)
                env = {**self._common, **DISTOPT_RUN.variables_of(rank, local_rank)}
                server = None if self._warm is None else self._warm.server
                streams = options.streams_of(local_rank)
                with starting(rank):
                    ranks.add(Program(rank, options.program, env, folder, streams, self._streams.outputs, server))
        except UsageError as error:
            text = f"on {self._me.host}, {error}"
            ranks.failures.append(Failure(rank, UsageError.exit_code, text, is_final=True))

    # -- ranks and signals -----------------------------------------------------------------------------------------
    @property
    def _ending(self) -> list[int]:
        """The signals among those that have been acted on which end the job."""
        return [signum for signum in self._signals if signum in ENDING_SIGNALS]

    def _look_at_ranks(self) -> None:
        ranks = self._ranks
        if ranks is None or self._code is not None or self._ended:
            return
        ranks.poll()
        if self._warm is not None:
            if ranks.ranks and (done := ranks.ranks[0].said.pop("stepped", None)):
                self._say("stepped", step=done["step"], every=done.get("every", 0))
            self._warm.prepare(ranks, self._common)
            self._warm.fail_stopped(ranks)
            self._warm.look(ranks)
        if ranks.running and self._clock.seconds() >= self._kill_at:
            ranks.kill()
        if not ranks.running:
            self._ended = True
            if isinstance(self._owner, RemoteOwner):
                self._show_ranks(at_the_end=True)
            if ranks.failures:
                ranks.kill()  # kills the processes that they have started
        if self._ended or len(ranks.failures) > self._reported:
            self._reported = len(ranks.failures)
            failures = [asdict(failure) for failure in ranks.failures]
            self._say("ended" if self._ended else "failed", failures=failures, signals=self._signals)

    def _show_ranks(self, *, at_the_end: bool = False) -> None:
        if self._monitor is not None and self._ranks is not None:
            again = "healing" if self._options.heal else "starting again"
            send = self._owner.say if isinstance(self._owner, RemoteOwner) else None
            self._monitor.report(self._ranks.ranks, again if self._attempt else "", send, at_the_end=at_the_end)

    def _handle_signals(self) -> None:
        while self._caught:
            signum = self._caught.pop(0)
            if self._ranks is None:
                if signum in ENDING_SIGNALS:
                    self._print(f"{signal.Signals(signum).name}: no rank has been started")
                    self._code = 128 + signum
                continue
            self._signals.append(signum)
            interrupts = self._signals.count(signal.SIGINT) if signum == signal.SIGINT else 0
            if interrupts > _KILLING:
                self._code = 128 + signum
            elif interrupts == _KILLING:
                self._ranks.poll()
                self._ranks.kill()
                self._say("kill", failures=[], signals=self._signals)
            else:
                self._streams.make_room()
                self._ranks.signal(signum)
                if interrupts:
                    self._kill_at = min(self._kill_at, self._clock.seconds() + SAVING_SECONDS)
            if self._options.heal and self._ended:  # while a node is waited for
                self._say("failed", failures=[], signals=self._signals)
                if self._owner is None and signum in ENDING_SIGNALS:
                    self._code = 128 + signum


def _reap() -> None:
    """Processes that ranks started became children of this one when the ranks ended, and would count as siblings."""
    with contextlib.suppress(ChildProcessError):  # there are none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
