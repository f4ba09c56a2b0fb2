"""`distopt run --heal` on one node: all that an agent keeps ready so that ranks start again where they were."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..heal.state_slots import StateSlots, seconds_to_give
from ..stopwatch import Stopwatch
from ..supervise.ranks import LocalRanks
from .courier import Receiver, Sender

if TYPE_CHECKING:
    from ..heal.fork_server import ForkServer
    from .options import RunOptions

# Then a stopped rank counts as failed, unless all are stopped, by scontrol suspend, for example.
_STOPPED_SECONDS = 0.05
_WRITING_SECONDS = 0.5  # in which files of live states grow, as long as ranks write them
_SLOWER = 8  # times as long as expected, at most: other processes need memory and cores, too
_IMPORT_SECONDS = 60.0  # then ranks start cold, whatever keeps the process from being ready


class WarmStart:
    """Memory for the states of the ranks, and the process that forks ranks; notices ranks that are stopped.

    Args:
        options: the command line.
        selector: waits for the process that forks ranks.
        warn: prints a line.
        key: of all nodes.
        listener: for states of ranks of the node before; None on one node.

    Attributes:
        state_slots: the memory of the ranks' states.
        server: the process; None before the first start of the ranks.
        receiver: takes states of ranks of the node before.
    """

    def __init__(
        self,
        options: RunOptions,
        selector: selectors.BaseSelector,
        warn: Callable[[str], None],
        key: bytes,
        listener: socket.socket | None,
    ) -> None:
        self.state_slots = StateSlots(options.ranks, 3 if options.nodes > 1 else 2)
        self.receiver = None if listener is None else Receiver(key, selector, listener, self.state_slots.arrivals)
        self._sender = Sender(self.state_slots.places, selector)
        self._key = key
        self._has_asked = False  # the ranks for their live states
        self._kill_at = self._kill_by = float("inf")  # when those are killed that have not given them, on the clock
        self._given = 0  # bytes of the files of live states at the last look
        self.server: ForkServer | None = None
        self._options = options
        self._selector, self._warn = selector, warn
        self._clock = Stopwatch()
        self._waits_until = float("inf")  # when ranks no longer wait for the process, on that clock
        self._stopped_at = float("inf")  # when ranks were first seen stopped, on that clock

    @property
    def poll_seconds(self) -> float:
        """How soon to call `fail_stopped` again."""
        return float("inf") if self._stopped_at == float("inf") else _STOPPED_SECONDS / 4

    def prepare(self, ranks: LocalRanks, env: Mapping[str, str]) -> None:
        """Start the process that forks ranks, with their environment; give it the modules that a rank names."""
        said, server = ranks.ranks[0].said.get("modules") if ranks.ranks else None, self.server
        if said is not None and server is not None and server.ready and not server.modules:
            server.close()  # the ranks have started again before one had named its modules: it lacks some
        if server is None or server.ended:
            from ..heal.fork_server import ForkServer

            with contextlib.suppress(OSError):  # a limit has been reached; ranks then start cold
                options = self._options
                server = self.server = ForkServer(options.program, options.ranks, env, self._selector, self._warn)
        if said is not None and server is not None and server.modules is None:
            server.complete(said["names"])

    def prepare_ahead(self, env: Mapping[str, str], modules: Sequence[str]) -> None:
        """Start the process that forks ranks before there are any, with these modules."""
        self.prepare(LocalRanks(self._selector), {**env, **self.state_slots.variable})
        if self.server is not None and self.server.modules is None:
            self.server.complete(modules)

    @property
    def modules(self) -> Sequence[str]:
        """The modules that a rank has named; none yet."""
        return (self.server.modules if self.server is not None else None) or []

    def start(self, order: Mapping[str, Any]) -> None:
        """Prepare the start of ranks, as ordered."""
        self._has_asked, self._kill_at = False, float("inf")
        self.state_slots.start([] if self.receiver is None else self.receiver.states)
        if order["next"] is not None:
            host, port = order["next"]
            self._sender.connect((host, port), self._key, order["node"], order["nodes"])

    def ask(self, ranks: LocalRanks) -> float:
        """Ask ranks for their live states, and end each that has given them, in `look`; the longest time for it."""
        n_bytes = max((rank.said["gives"]["bytes"] for rank in ranks.running if "gives" in rank.said), default=0)
        seconds = seconds_to_give(n_bytes)
        if not self._has_asked:
            now, self._has_asked, self._given = self._clock.seconds(), True, self._given_bytes()
            self._kill_at, self._kill_by = now + seconds, now + _SLOWER * seconds
            self.state_slots.ask()
        self.look(ranks)
        return _SLOWER * seconds

    def _given_bytes(self) -> int:
        """The memory that live states take."""
        return sum(512 * os.fstat(fd).st_blocks for fd in self.state_slots.fds.gifts)

    def look(self, ranks: LocalRanks) -> None:
        """Send own states that ranks have kept on; end ranks that have been asked for their states and gave them."""
        if self.receiver is not None:
            self.receiver.check_times()
            self._sender.check_time()
        if [rank for rank in ranks.ranks if rank.said.pop("kept", None)]:
            self._sender.look()
        if self._has_asked:
            now = self._clock.seconds()
            if now >= self._kill_at and self._given != (given := self._given_bytes()):
                self._given, self._kill_at = given, min(now + _WRITING_SECONDS, self._kill_by)
            stopped, is_over = ranks.stopped, now >= self._kill_at
            for rank in ranks.running:
                if is_over or rank in stopped or "gives" not in rank.said or "gave" in rank.said:
                    rank.kill()

    def is_worth_waiting_for(self) -> bool:
        """Whether ranks that start again are to wait: the process is importing what they would have to import.

        Ranks would not import it faster beside that process.
        """
        server, now = self.server, self._clock.seconds()
        if server is None or not server.is_importing:
            self._waits_until = float("inf")
            return False
        if server.modules is None:
            server.complete([])
        self._waits_until = min(self._waits_until, now + _IMPORT_SECONDS)
        return now < self._waits_until

    def fail_stopped(self, ranks: LocalRanks) -> None:
        """Have ranks that have been stopped for a moment fail, if others run."""
        now, stopped = self._clock.seconds(), ranks.stopped
        if not stopped or (self._options.nodes == 1 and len(stopped) == len(ranks.running)):
            self._stopped_at = float("inf")
        elif self._stopped_at == float("inf"):
            self._stopped_at = now
        elif now > self._stopped_at + _STOPPED_SECONDS:
            for rank in stopped:
                ranks.fail(rank, 128 + signal.SIGSTOP, "was stopped, as by SIGSTOP or the freezer, while others ran")

    def close(self) -> None:
        """End the process, and give the memory back."""
        if self.server is not None:
            self.server.close()
        self._sender.close()
        if self.receiver is not None:
            self.receiver.close()
        self.state_slots.close()
