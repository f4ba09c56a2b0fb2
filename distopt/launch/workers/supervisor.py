"""`distopt run --workers` on one node: starts its workers, each a job of its own, and meets the other nodes.

A worker is supervised by a `distopt run --heal` of its own. So the loss of a rank starts the ranks of its worker again,
and ends no other worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ...errors import LaunchError
from ...settings import Settings
from ..addresses import is_own
from ..agents.node import NO_RANK
from ..gate import FOR_AGENT, LONGEST_CALL_SECONDS, RefusedError, call
from ..processes import ENDING_SIGNALS, SAVING_SECONDS, caught_signals, describe_exit, die_with, print_last
from ..sockets import handle_events, listen
from ..stopwatch import Stopwatch
from .service import Service
from .variables import variables

if TYPE_CHECKING:
    from ..agents.options import RunOptions

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_LOOK_SECONDS = 0.05
_SHORT_SECONDS = 10.0  # a worker that is killed sooner after its start is not started again


def run(options: RunOptions) -> int:
    """Run this node's workers to their end; return the exit code: 0 if one of them has ended well.

    Raises:
        LaunchError: the owner of the endpoint refuses this node, or cannot be reached.
    """
    with contextlib.ExitStack() as stack:
        caught, wake = stack.enter_context(caught_signals(_PASSED_ON, last=True))
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(wake, selectors.EVENT_READ, partial(os.read, wake, 4096))
        supervisor = _Supervisor(options, caught, selector)
        stack.callback(supervisor.close)
        return supervisor.run()


def _say(text: str) -> None:
    print_last(f"distopt run: {text}")


class _Worker:
    """The process that supervises the ranks of one worker."""

    def __init__(self, options: RunOptions, place: int, env: dict[str, str]) -> None:
        ranks = 1 if options.workers == "rank" else options.ranks
        words = [sys.executable, "-m", "distopt", "run", "--heal", "--nproc-per-node", str(ranks)]
        if options.log_dir is not None:
            words += ["--log-dir", str(options.log_dir / f"worker_{place}")]
        self._command, self._env = [*words, *options.program[1:]], env
        self.start()

    def start(self) -> None:
        self.began, self.code = time.monotonic(), None
        self._process = subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - this process has no other thread
        )

    code: int | None

    def poll(self) -> None:
        """Notice the end; a process that was killed is started again, unless it has just been."""
        if self.code is None and (code := self._process.poll()) is not None:
            if code == -signal.SIGKILL and time.monotonic() > self.began + _SHORT_SECONDS:
                _say(f"pid {self._process.pid}, which supervises a worker, was killed; starting the worker again")
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


class _Supervisor:
    def __init__(self, options: RunOptions, caught: list[int], selector: selectors.BaseSelector) -> None:
        self._options, self._caught, self._selector = options, caught, selector
        secret = Settings.from_env().job_secret
        self._key = hashlib.sha256(f"distopt run --workers {json.dumps(options.run_id)} {secret}".encode()).digest()
        if options.nodes == 1:  # no other node is to come
            self._key = os.urandom(32)
        self._workers: list[_Worker] = []
        self._service: Service | None = None
        self._link: socket.socket | None = None  # to the owner of the endpoint
        self._call_at = 0.0
        self._kill_at = float("inf")

    def run(self) -> int:
        options = self._options
        port = self._begin_service()
        if self._service is None:
            self._call()
        env = variables(f"{options.host}:{port}", self._key)
        count = options.ranks if options.workers == "rank" else 1
        self._workers = [_Worker(options, place, env) for place in range(count)]
        while not self._has_ended():
            handle_events(self._selector, _LOOK_SECONDS)
            self._pass_signals()
            for worker in self._workers:
                worker.poll()
            if self._service is not None:
                self._service.check_times()
            elif self._link is None and time.monotonic() > self._call_at:
                self._call_again()
        codes = [worker.code or 0 for worker in self._workers]
        return min(codes)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        if self._service is not None:
            self._service.close()

    def _has_ended(self) -> bool:
        if any(worker.code is None for worker in self._workers):
            return False
        return self._service is None or not self._service.is_needed or any(s in ENDING_SIGNALS for s in self._caught)

    def _begin_service(self) -> int:
        """Own the endpoint, if this node has its address and no other program has; its port."""
        options = self._options
        most = options.nodes * (options.ranks if options.workers == "rank" else 1)
        if options.nodes > 1 and not is_own(options.host):
            return options.port
        listener = None
        with contextlib.suppress(OSError):  # another supervisor of this host owns it
            listener = listen(options.port if options.nodes > 1 else 0, most + 16)
        if listener is None:
            return options.port
        self._service = Service(self._key, most, options.nodes, options.host, self._selector, _say)
        self._service.listen(listener)
        return int(listener.getsockname()[1])

    # -- the owner of the endpoint, on another node ------------------------------------------------------------------
    def _call(self) -> None:
        """Connect to the owner for the first time."""
        clock, wait = Stopwatch(LONGEST_CALL_SECONDS), self._options.timeout
        while self._link is None and not any(signum in ENDING_SIGNALS for signum in self._caught):
            try:
                self._call_once(clock)
            except OSError as error:  # noqa: PERF203 - it is called until it answers
                if clock.seconds() > wait:
                    raise LaunchError(
                        f"no distopt run --workers answers at {self._options.endpoint} within {wait:g} s ({error}); "
                        "run the same line on the node that has this address"
                    ) from None
                handle_events(self._selector, _LOOK_SECONDS)

    def _call_once(self, clock: Stopwatch) -> None:
        options = self._options
        try:
            link = call((options.host, options.port), self._key, FOR_AGENT, NO_RANK, options.nodes, clock)
        except RefusedError as error:
            raise LaunchError(f"{options.endpoint} refuses this node: {error}") from None
        self._link = link
        self._selector.register(link, selectors.EVENT_READ, self._read)

    def _call_again(self) -> None:
        self._call_at = time.monotonic() + 1.0
        with contextlib.suppress(OSError):
            self._call_once(Stopwatch(LONGEST_CALL_SECONDS))
            _say(f"{self._options.endpoint} can be reached again")

    def _read(self) -> None:
        """The owner says nothing: its connection has ended."""
        link = self._link
        assert link is not None
        with contextlib.suppress(OSError):
            if link.recv(1 << 12):
                return
        self._selector.unregister(link)
        link.close()
        self._link = None
        if any(worker.code is None for worker in self._workers):
            _say(
                f"{self._options.endpoint} has ended or cannot be reached; the workers go on to their next average, "
                "and wait there for it, or for the same line typed at it"
            )

    # -- signals -----------------------------------------------------------------------------------------------------
    def _pass_signals(self) -> None:
        for signum in self._new_signals():
            for worker in self._workers:
                worker.signal(signum)
            if signum in ENDING_SIGNALS:
                self._kill_at = min(self._kill_at, time.monotonic() + SAVING_SECONDS + 5.0)
        if time.monotonic() > self._kill_at:
            for worker in self._workers:
                worker.signal(signal.SIGKILL)

    _passed = 0

    def _new_signals(self) -> Iterator[int]:
        while self._passed < len(self._caught):
            self._passed += 1
            yield self._caught[self._passed - 1]
