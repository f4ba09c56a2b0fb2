"""The ranks of one node under `distopt run`, in one attempt: programs started, watched and ended together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from ...errors import UsageError
from ..ending import ENDED_BY_SIGTERM, describe_exit, die_with
from .output import Relay

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Failure", "LocalRanks"]

# A rank ends with one of these because another has ended.
_CONSEQUENCES = (
    "distopt.errors.PeerLostError",
    "distopt.errors.CommunicatorClosedError",
    "distopt.errors.CommunicatorError: MPI failed",
)


@dataclass(frozen=True)
class Failure:
    """How a rank, or a node, has failed.

    Attributes:
        rank: the rank, or the first one of the node.
        code: the exit code that a shell would see.
        text: who has failed, and how, in one line.
        is_consequence: whether another failure is known to be the cause, or is more likely to be.
        is_final: whether to start again would be in vain.
    """

    rank: int
    code: int
    text: str
    is_consequence: bool = False
    is_final: bool = False


class _Rank:
    """A process in a session of its own, so that a terminal's Ctrl-C reaches it through its agent only."""

    def __init__(self, rank: int, program: Sequence[str], env: Mapping[str, str], folder: Path | None) -> None:
        self.rank = rank
        self.folder = folder
        self.killed = False
        self.ended = False
        mark = b"[rank %d] " % rank if rank else b""
        logs: list[BinaryIO | None] = [None, None]
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            logs = [(folder / name).open("wb", buffering=0) for name in ("stdout.log", "stderr.log")]
        self.relays = [Relay(target, mark, log) for target, log in zip((1, 2), logs, strict=True)]
        try:
            self._process = subprocess.Popen(
                program,
                env=env,
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=self.relays[0].sink,
                stderr=self.relays[1].sink,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - this process has no other thread
            )
        finally:
            for relay in self.relays:
                os.close(relay.sink)
        self.pid = self._process.pid

    def look(self) -> int | None:
        """The exit code if the process has just ended. It stays a zombie: nobody else gets the number of its group."""
        if self.ended:
            return None
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        self.ended = True
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def kill(self) -> None:
        """Kill all that is left of the process and of those that it has started in its group."""
        self.killed = self.killed or not self.ended
        os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        self._process.wait()


class LocalRanks:
    """The ranks of this node.

    Args:
        selector: gets the output of the ranks registered, each with a function to call.

    Attributes:
        failures: of the ranks that have failed, in the order in which they did.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.failures: list[Failure] = []
        self._selector = selector
        self._ranks: list[_Rank] = []

    def start(self, rank: int, program: Sequence[str], env: Mapping[str, str], folder: Path | None) -> None:
        """Local. Start a program as this rank.

        Args:
            rank: rank in the job.
            program: the words of the command.
            env: its environment.
            folder: where its output goes besides the output of this process, as `stdout.log` and `stderr.log`.

        Raises:
            UsageError: the program cannot be started, or the log files cannot be written.
        """
        try:
            started = _Rank(rank, program, env, folder)
        except (OSError, subprocess.SubprocessError) as error:
            raise UsageError(f"rank {rank} cannot be started: {error}") from None
        self._ranks.append(started)
        for relay in started.relays:
            self._selector.register(relay.source, selectors.EVENT_READ, partial(self._pass_on, relay))

    @property
    def running(self) -> bool:
        """Whether a rank has not ended."""
        return any(not rank.ended for rank in self._ranks)

    def look(self) -> None:
        """Local. Notice the ranks that have ended."""
        found = [(code, rank) for rank in self._ranks if (code := rank.look()) is not None]
        # Of two ends that are noticed together, a signal is more likely to be the cause of the other.
        for code, rank in sorted(found, key=lambda end: (end[0] >= 0, end[1].rank)):
            for relay in rank.relays:
                self._finish(relay)
            if code:
                self.failures.append(self._failure(rank, code))

    def _failure(self, rank: _Rank, exit_code: int) -> Failure:
        code, text = describe_exit(exit_code)
        error = rank.relays[1].error
        if error and exit_code > 0:
            text = f"{text}: {error}"
        if rank.folder is not None:
            text = f"{text}; see {rank.folder}"
        who = f"rank {rank.rank} on {socket.gethostname()} (pid {rank.pid})"
        caused = rank.killed or error.startswith(_CONSEQUENCES) or (code == ENDED_BY_SIGTERM and not error)
        return Failure(rank.rank, code, f"{who} {text}", is_consequence=caused)

    def signal(self, signum: int) -> None:
        """Local. Send a signal to all ranks that run."""
        for rank in self._ranks:
            if not rank.ended:
                os.kill(rank.pid, signum)

    def kill(self) -> None:
        """Local. Kill all ranks, and what they have started and left behind."""
        for rank in self._ranks:
            rank.kill()

    def close(self) -> None:
        """Local. Release what the ranks have held; if any still run, kill them. Idempotent."""
        if self.running:
            self.kill()
        for rank in self._ranks:
            for relay in rank.relays:
                self._finish(relay)
            rank.reap()
        self._ranks = []

    def _pass_on(self, relay: Relay) -> None:
        with contextlib.suppress(BlockingIOError):
            if not relay.pass_on():
                self._finish(relay)

    def _finish(self, relay: Relay) -> None:
        if relay.source >= 0:
            if relay.source in self._selector.get_map():
                self._selector.unregister(relay.source)
            relay.finish()
