"""`distopt run --heal` on one node: all that an agent keeps ready so that ranks start again where they were."""

from __future__ import annotations

import contextlib
import selectors
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..heal.slots import Slots
from ..stopwatch import Stopwatch

if TYPE_CHECKING:
    from ..heal.fork_server import ForkServer
    from ..supervise.ranks import LocalRanks
    from .options import RunOptions

# Then a stopped rank counts as failed, unless all are stopped, by scontrol suspend, for example.
_STOPPED_SECONDS = 0.05


class WarmStart:
    """Memory for the states of the ranks, and the process that forks ranks; notices ranks that are stopped.

    Args:
        options: the command line.
        selector: waits for the process that forks ranks.
        warn: prints a line.

    Attributes:
        slots: the memory.
        server: the process; None until a rank has named its modules.
    """

    def __init__(self, options: RunOptions, selector: selectors.BaseSelector, warn: Callable[[str], None]) -> None:
        self.slots = Slots(options.ranks, 3 if options.nodes > 1 else 2)
        self.server: ForkServer | None = None
        self._options = options
        self._selector, self._warn = selector, warn
        self._clock = Stopwatch()
        self._stopped_at = float("inf")  # when ranks were first seen stopped, on that clock

    @property
    def look_seconds(self) -> float:
        """Local. How soon to call `fail_stopped` again."""
        return float("inf") if self._stopped_at == float("inf") else _STOPPED_SECONDS / 4

    def prepare(self, ranks: LocalRanks, env: Mapping[str, str]) -> None:
        """Local. Start the process that forks ranks, with their environment, once a rank has named its modules."""
        modules = ranks.ranks[0].said.get("modules") if ranks.ranks else None
        if modules is not None and (self.server is None or self.server.ended):
            from ..heal.fork_server import ForkServer

            with contextlib.suppress(OSError):  # a limit has been reached; ranks then start cold
                names, n_spares = modules["names"], self._options.ranks
                self.server = ForkServer(names, n_spares, env, self._selector, self._warn)

    def fail_stopped(self, ranks: LocalRanks) -> None:
        """Local. Have ranks that have been stopped for a moment fail, if others run."""
        now, stopped = self._clock.seconds(), ranks.stopped
        if not stopped or (self._options.nodes == 1 and len(stopped) == len(ranks.running)):
            self._stopped_at = float("inf")
        elif self._stopped_at == float("inf"):
            self._stopped_at = now
        elif now > self._stopped_at + _STOPPED_SECONDS:
            for rank in stopped:
                ranks.fail(rank, 128 + signal.SIGSTOP, "was stopped, as by SIGSTOP or the freezer, while others ran")

    def close(self) -> None:
        """Local. End the process, and give the memory back."""
        if self.server is not None:
            self.server.close()
        self.slots.close()
