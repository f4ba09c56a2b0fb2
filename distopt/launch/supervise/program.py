"""A rank of `distopt run`: any program. Its output is passed on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..end_together.report import VARIABLE
from ..heal.state_slots import state_slots_in
from ..processes import describe_exit, die_with
from ..words import rank_here
from .output import Output, Relay
from .ranks import Rank

if TYPE_CHECKING:
    from ..heal.fork_server import ForkServer


class Program(Rank):
    """A process in a session of its own, so that a terminal's Ctrl-C reaches it through its agent only.

    Args:
        rank: rank in the job.
        program: the words of the command.
        env: its environment.
        folder: for files of its output, `stdout.log` and `stderr.log`.
        streams: for both, whether it is shown, and whether it goes to the file.
        outputs: where its stdout and stderr are shown.
        server: the process that forks it, if it is not to start cold.

    Raises:
        OSError: the program cannot be started, or the log files cannot be written.
        subprocess.SubprocessError: this process is ending.
    """

    def __init__(
        self,
        rank: int,
        program: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        streams: Sequence[tuple[bool, bool]],
        outputs: Sequence[Output],
        server: ForkServer | None = None,
    ) -> None:
        super().__init__(rank)
        self._folder = folder if any(is_logged for _, is_logged in streams) else None
        self._process: subprocess.Popen[bytes] | None = None  # None if the fork server has forked it
        env = {**env, VARIABLE: f"{os.getpid()} {self.sink}"}
        mark = b"[rank %d] " % rank if rank else b""
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self.sink)
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            is_interactive = rank == 0 and os.isatty(0)
            self._relays = []
            for output, name, (is_shown, is_logged) in zip(outputs, ("stdout", "stderr"), streams, strict=True):
                log = (folder / f"{name}.log").open("wb", buffering=0) if is_logged else None
                prompts = is_interactive and output.shows_prompts
                self._relays.append(Relay(output, mark, log, prompts=prompts, shows=is_shown))
            none = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            stdin, stdout, stderr = standard = [0 if rank == 0 else none, *(relay.sink for relay in self._relays)]
            for fd in (none, stdout, stderr):
                stack.callback(os.close, fd)
            if server is not None:
                self.pid = server.fork({"program": program, "env": env}, [*standard, self.sink])
            if not self.pid:
                self._process = subprocess.Popen(
                    program,
                    env=env,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(self.sink, *state_slots_in(env)),
                    start_new_session=True,
                    preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - this process has no other thread
                )
                self.pid = self._process.pid

    def kill(self) -> None:
        """Kill the process, and the group of processes that it has started, even if it has ended itself."""
        super().kill()
        with contextlib.suppress(ProcessLookupError):  # killed before it had a group, between fork and exec
            os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Pass on the rest of the output, and release what the process holds."""
        super().release()
        self._finish()
        if self._process is not None:
            self._process.wait()
        else:
            os.waitpid(self.pid, 0)

    def _poll(self) -> int | None:
        """Leave it a zombie, so that no other process gets the number of its group."""
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def _describe(self, code: int, reported: str | None) -> tuple[int, str]:
        self._finish()
        exit_code = self.exit_code or 0
        if reported is None or exit_code > 0:
            code, text = describe_exit(exit_code)
            quoted = reported or (self._relays[1].error if exit_code > 0 else "")
            text = f"{text}: {quoted}" if quoted else text
        else:
            text = f"failed: {reported}"  # a signal has arrived while it ended
        if self._folder is not None:
            text = f"{text}; see {self._folder}"
        return code, f"{rank_here(self.rank, self.pid)} {text}"

    def _finish(self) -> None:
        for relay in self._relays:
            relay.finish()
