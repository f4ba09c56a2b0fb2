"""`distopt run --workers` on one node: starts its workers, each a job of its own, and meets the other nodes.

A worker is supervised by a `distopt run --heal` of its own. So the loss of a rank starts the ranks of its worker again,
and ends no other worker.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from ...settings import Settings
from ..agents.election import Election
from ..agents.monitor import Display, Row, row_of
from ..agents.node import NO_RANK, Node
from ..agents.remote import RemoteOwner
from ..processes import (
    ENDING_SIGNALS,
    PASSED_ON_SIGNALS,
    SAVING_SECONDS,
    caught_signals,
    describe_exit,
    die_with,
    print_last,
)
from ..sockets import handle_events, listen
from ..supervise.output import Output, Relay
from ..supervise.screen import Streams
from ..threads import thread_variables
from .monitor import WorkersMonitor
from .service import Service
from .variables import Sign

if TYPE_CHECKING:
    from ..agents.options import RunOptions

_LOOK_SECONDS = 0.05
_BACKLOG = 64
_SHORT_SECONDS = 10.0  # a worker that is killed sooner after its start is not started again


def run(options: RunOptions) -> int:
    """Run this node's workers to their end; return the exit code: 0 if one of them has ended well.

    Raises:
        LaunchError: the other nodes refuse this one, or too few can be reached for too long.
    """
    with contextlib.ExitStack() as stack:
        caught, wake = stack.enter_context(caught_signals(PASSED_ON_SIGNALS, last=True))
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(wake, selectors.EVENT_READ, partial(os.read, wake, 4096))
        supervisor = _Supervisor(options, caught, selector)
        stack.callback(supervisor.close)
        return supervisor.run()


def _say(text: str) -> None:
    print_last(f"distopt run: {text}")


def _timeline(place: int) -> dict[str, str]:
    """The environment by which a worker has timelines of its own: ranks of several workers have equal numbers."""
    folder = Settings.from_env().timeline
    return {} if folder is None else {"DISTOPT_TIMELINE": f"{folder}/worker-{socket.gethostname()}-{place}"}


class _Worker:
    """The process that supervises the ranks of one worker.

    Args:
        options: of this node.
        place: number among the workers of this node.
        env: its environment.
        say: prints a line.
        outputs: where its stdout and stderr are shown, under --watch; else none, and it has those of this process.
        takes: gets a row of one of its ranks, under --watch.
    """

    def __init__(
        self,
        options: RunOptions,
        place: int,
        env: dict[str, str],
        say: Callable[[str], None],
        outputs: Sequence[Output],
        takes: Callable[[int, Row], None],
    ) -> None:
        ranks = 1 if options.workers == "rank" else options.ranks
        words = [sys.executable, "-m", "distopt", "run", "--heal", "--nproc-per-node", str(ranks)]
        if options.log_dir is not None:
            words += ["--log-dir", str(options.log_dir / f"worker_{place}")]
        if outputs:
            words.append("--watch=json")
        self._command, self._env, self._say = [*words, *options.program[1:]], env, say
        self._place, self._outputs, self._takes = place, outputs, takes
        self._relays: list[Relay] = []
        self.code: int | None = None  # of its end
        self.start()

    def start(self) -> None:
        """Start the worker, or start it again."""
        self.began, self.code = time.monotonic(), None
        self._relays = [Relay(output, takes=self._take) for output in self._outputs]
        stdout, stderr = [relay.sink for relay in self._relays] or (None, None)
        self._process = subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - this process has no other thread
        )
        for relay in self._relays:
            os.close(relay.sink)

    def _take(self, line: bytes) -> bool:
        if (row := row_of(line)) is None:
            return False
        self._takes(self._place, row)
        return True

    def poll(self) -> None:
        """Notice the end; a process that was killed is started again, unless it has just been."""
        if self.code is None and (code := self._process.poll()) is not None:
            for relay in self._relays:
                relay.finish()
            if code == -signal.SIGKILL and time.monotonic() > self.began + _SHORT_SECONDS:
                self._say(f"pid {self._process.pid}, which supervises a worker, was killed; starting the worker again")
                self.start()
            else:
                self.code, _ = describe_exit(code)

    def signal(self, signum: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    def close(self) -> None:
        if self.code is None:
            self._process.kill()  # and its ranks with it
            self._process.wait()
            for relay in self._relays:
                relay.finish()


class _Supervisor:
    def __init__(self, options: RunOptions, caught: list[int], selector: selectors.BaseSelector) -> None:
        self._options, self._caught, self._selector = options, caught, selector
        self._streams: Streams | None = None  # under --watch
        if options.watch:
            self._streams = Streams(selector, "distopt run", table=options.watch == "table")
        self._key = options.key if options.nodes > 1 else os.urandom(32)  # on one node, no other is to come
        self._me = Node(socket.gethostname(), os.getpid(), NO_RANK, lambda _: None, options.host)
        self._workers: list[_Worker] = []
        self._sign = Sign()
        self._owner: Service | RemoteOwner | None = None
        self._term = -1  # in which this node has the service
        self._n_passed = 0  # signals that the workers have got
        self._kill_at = float("inf")
        self._election: Election | None = None
        if options.nodes > 1:
            self._election = Election(options, self._key, selector, self._say)
            if (host := self._election.host) is not None:
                self._me.address = options.places[host][0]
            self._me.peer = self._election.hello()["peer"]

    def run(self) -> int:
        """Supervise the workers to their end; the exit code."""
        if self._election is None:
            self._serve(listen(0, _BACKLOG))
        while not self._has_ended():
            handle_events(self._selector, _LOOK_SECONDS)
            self._pass_signals()
            for worker in self._workers:
                worker.poll()
            if self._election is not None:
                self._follow(self._election)
            if isinstance(self._owner, Service):
                self._owner.check_times()
                self._owner.show()
            if self._owner is not None and not self._workers:
                self._start()
        if isinstance(self._owner, Service):
            self._owner.show(at_the_end=True)
        codes = [worker.code or 0 for worker in self._workers] or [128 + self._ending[0]]
        return min(codes)

    def close(self) -> None:
        """End the workers and the service of this node, if they run."""
        for worker in self._workers:
            worker.close()
        if self._owner is not None:
            self._owner.close()
        if self._election is not None:  # after a signal, the same line may be typed again while the others wait for it
            self._election.close(is_remembered=bool(self._ending))
        self._sign.close()
        if self._streams is not None:
            self._streams.close(lambda: bool(self._caught))

    def _say(self, text: str) -> None:
        (_say if self._streams is None else self._streams.print)(text)

    def _take(self, place: int, row: Row) -> None:
        """A row of a worker of this node: it goes to the service."""
        if isinstance(self._owner, RemoteOwner):
            self._owner.say({"say": "watch", "place": place, "row": asdict(row)})
        elif self._owner is not None and self._owner.monitor is not None:
            self._owner.monitor.take(self._me.id, place, row)

    def _start(self) -> None:
        options, env = self._options, self._sign.variables(self._key)
        count = options.ranks if options.workers == "rank" else 1
        if count > 1:  # each would take all cores of the node for its one rank
            env = {**env, **thread_variables(count, env)}
        outputs = () if self._streams is None else self._streams.outputs
        self._workers = [
            _Worker(options, place, {**env, **_timeline(place)}, self._say, outputs, self._take)
            for place in range(count)
        ]

    @property
    def _ending(self) -> list[int]:
        return [signum for signum in self._caught if signum in ENDING_SIGNALS]

    def _has_ended(self) -> bool:
        if any(worker.code is None for worker in self._workers) or not (self._workers or self._ending):
            return False
        return not isinstance(self._owner, Service) or not self._owner.is_needed or bool(self._ending)

    # -- the service, here or on another node ------------------------------------------------------------------------
    def _follow(self, election: Election) -> None:
        """Find the service, and have it here if this node is elected."""
        election.tick()
        state, owner = election.state, self._owner
        if isinstance(owner, Service) and not (state.is_owner and state.term == self._term):
            self._leave(owner, f"{self._me.name} names no members any more: another node does, or waits for more nodes")
        elif isinstance(owner, RemoteOwner) and election.has_lost(owner):
            self._leave(owner, f"{owner.name} has ended or cannot be reached; {election.expects()}")
        if self._owner is None and state.is_owner:
            self._term, self._me.id = state.term, state.me
            if (own := state.members.info.get(state.me)) is not None:
                self._me.address = own["address"]
            if not state.members.is_fresh:
                self._say(f"{self._me.name} names the members from now on")
            self._serve(election.listen())
        elif self._owner is None:
            election.seek(NO_RANK, self._reached)

    def _serve(self, listener: socket.socket) -> None:
        options = self._options
        most = options.nodes * (options.ranks if options.workers == "rank" else 1)
        self._owner = Service(self._key, most, options.nodes, self._me, self._selector, self._say, self._election)
        if self._streams is not None:
            self._owner.monitor = WorkersMonitor(Display(options.watch, self._streams.outputs[1]))
        self._owner.listen(listener)
        self._sign.show(self._me.address, listener.getsockname()[1])

    def _reached(self, link: socket.socket, agent: str) -> None:
        assert self._election is not None
        host, port = link.getpeername()[:2]
        name = f"the node that names the members, {host},"
        self._owner = RemoteOwner(link, name, agent, self._selector, deque())
        self._owner.say(self._election.hello())
        self._sign.show(host.removeprefix("::ffff:"), port)

    def _leave(self, owner: Service | RemoteOwner, text: str) -> None:
        owner.close()
        self._owner = None
        if any(worker.code is None for worker in self._workers):
            self._say(f"{text}; the workers go on to their next average")

    # -- signals -----------------------------------------------------------------------------------------------------
    def _pass_signals(self) -> None:
        new, self._n_passed = self._caught[self._n_passed :], len(self._caught)
        for signum in new:
            for worker in self._workers:
                worker.signal(signum)
            if signum in ENDING_SIGNALS:
                self._kill_at = min(self._kill_at, time.monotonic() + SAVING_SECONDS + 5.0)
        if time.monotonic() > self._kill_at:
            for worker in self._workers:
                worker.signal(signal.SIGKILL)
