"""When a flight record is written, and where: at a failure of a rank and at SIGQUIT, for all ranks of the host."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any

from ..errors import DistoptError, UsageError
from ..settings import Settings
from .ring import MAX_GROUPS, GroupRecord, Ring

_log = logging.getLogger("distopt")

_STACK_LOOKS, _LOOK_SECONDS = 20, 0.03  # then this process no longer waits for the stacks of other processes
_REQUEST_NS = 2_000_000_000  # a SIGQUIT within this time of another rank's request belongs to it


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no folder can be written to; the first record that fails to be written warns of it
        return "/tmp"


class FlightRecord:
    """The record of this process, if it is a rank, and those of other processes of its host."""

    def __init__(self) -> None:
        self._mine: Ring | None = None
        self._rings: dict[str, Ring] = {}  # of other processes, by token
        self._names: list[str] = []  # of groups
        self._has_failed = False

    def offer(self) -> dict[str, Any]:
        """This process's ring, made at first use, for `open_group` of other ranks, or `add` of a supervisor."""
        settings = Settings.from_env()
        if self._mine is None and settings.flight_records and not self._has_failed:
            with self._one_warning("there is no flight record"):
                fd = os.memfd_create("distopt flight record", os.MFD_CLOEXEC)
                self._mine = Ring(fd, os.getpid(), settings.flight_records)
        folder = Path(settings.flight_folder or f"{_temporary_folder()}/distopt-flight-{token_hex(4)}")
        ring = self._mine and self._mine.about
        return {"host": socket.gethostname(), "folder": str(folder.absolute()), "ring": ring}

    def open_group(
        self, name: str, ranks: Sequence[int], rank: int, offers: Sequence[dict[str, Any]] = ()
    ) -> GroupRecord | None:
        """Record the operations of a group; None without a record.

        Args:
            name: equal on all ranks, which make groups of one name in the same order.
            ranks: their numbers in the job.
            rank: of this process in the job.
            offers: of these ranks; none if the ranks are among those of an earlier group.
        """
        for offer in offers:
            if offer["host"] == socket.gethostname():
                self.add(offer["ring"])
        ring, index = self._mine, len(self._names)
        if ring is None or index == MAX_GROUPS or len(ranks) == 1:
            return None
        if not index:
            ring.add_text({"rank": rank, "folder": offers[0]["folder"], "answers": self._answer_signals(ring)})
        own = f"{name} #{count}" if (count := self._names.count(name)) else name
        ring.add_text({"name": own, "desc": "distopt", "ranks": list(ranks)})
        self._names.append(name)
        return GroupRecord(ring, index, own, ranks, rank)

    def add(self, about: Sequence[Any] | None) -> Ring | None:
        """Open the ring of another process of this host, as `offer` describes it, where that is possible."""
        if about is not None and about[1] != os.getpid():
            with contextlib.suppress(OSError, ValueError):  # it has ended, or is in another container
                self._rings[about[3]] = ring = Ring(*about)
                return ring
        return None

    @property
    def progress(self) -> memoryview | None:
        """`Ring.progress` of this process; None before `offer` and without a record."""
        return None if self._mine is None else self._mine.progress

    def forget(self) -> None:
        """Forget the rings of other processes."""
        self._rings.clear()

    # -- writing -----------------------------------------------------------------------------------------------------
    def write(self, reason: str, error: BaseException | None = None) -> str:
        """Write the record of this rank, and of each rank of its host that has not written its own.

        Args:
            reason: why, in a line.
            error: the exception that ends this process; its traceback precedes the stacks of the threads.

        Returns:
            The folder; empty without a record, or if it cannot be written, which is said once.
        """
        own = self._mine if self._names else None
        if own is not None and own.about[1] != os.getpid():  # a forked child
            return ""
        with self._one_warning("the flight record cannot be written"):
            every = [(ring, ring.read()) for ring in (own, *self._rings.values()) if ring is not None and ring.head[1]]
            folder = str(_path(every[0][1]).parent) if every else ""
            found = [(ring, content) for ring, content in every if ring is own or not _path(content).exists()]
            if own is not None:
                if error is not None:
                    os.write(own.about[0], "".join(traceback.format_exception(error)).encode())
                faulthandler.dump_traceback(own.about[0])
            _save(found, reason)  # at once, since a launcher may kill this process at any moment
            others = [ring for ring, content in found if ring is not own and content["answers"]]
            requested = [ring for ring in others if ring.request_stacks()]
            before: list[int] = []
            for _ in range(_STACK_LOOKS if requested else 0):
                sizes = [len(ring.stacks()) for ring in requested]
                if all(sizes) and sizes == before:
                    break
                before = sizes
                time.sleep(_LOOK_SECONDS)
            # Also of a rank that has saved its record and waits above: its launcher may end it before it comes here.
            for ring, content in every:
                path = Path(folder, f"stacks-{content['rank']}.txt")
                if (ring is own or not path.exists()) and (stacks := ring.stacks()):
                    _replace(path, stacks)
            _save([(ring, ring.read()) for ring, _ in found], reason)  # others may have come to the same operation
            return folder
        return ""  # type: ignore[unreachable] # where `_one_warning` has met an error

    @contextlib.contextmanager
    def _one_warning(self, fact: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an error of the job is about to be raised, which matters more
            if not self._has_failed:
                _log.warning("%s: %s; training goes on", fact, error)
            self._has_failed = True

    # -- when --------------------------------------------------------------------------------------------------------
    def failed(self, error: BaseException) -> None:
        """An exception ends this process; one that the script catches leaves no record."""
        usage = isinstance(error, DistoptError) and error.exit_code == UsageError.exit_code
        if isinstance(error, Exception) and not usage:
            self._write_and_log(f"{type(error).__name__}: {error}", error)

    def _write_and_log(self, reason: str, error: BaseException | None = None) -> None:
        if folder := self.write(reason, error):
            _log.warning("flight record in %s", folder)

    def _answer_signals(self, ring: Ring) -> bool:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.failed(error)
            before(kind, error, trace)

        def on_quit(*_: object) -> None:
            if time.monotonic_ns() - ring.head[2] > _REQUEST_NS:
                self._write_and_log("SIGQUIT")

        sys.excepthook = hook
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGQUIT):
            return False  # the script has a use of its own for it
        signal.signal(signal.SIGQUIT, on_quit)
        faulthandler.register(signal.SIGQUIT, ring.about[0], chain=True)
        atexit.register(_ignore_sigquit)
        return True


def _ignore_sigquit() -> None:
    """Python is about to restore the signal's default action, by which a request of another rank would kill."""
    faulthandler.unregister(signal.SIGQUIT)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)


def _save(found: Sequence[tuple[Ring, dict[str, Any]]], reason: str) -> None:
    for _, content in found:
        path = _path(content)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(path, pickle.dumps({**content, "reason": reason}))


def _replace(path: Path, content: bytes) -> None:
    """Write a file that is whole at any moment, though several processes write it and may be killed."""
    part = path.with_name(f"{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


def _path(content: dict[str, Any]) -> Path:
    return Path(f"{os.environ.get('TORCH_FR_DUMP_TEMP_FILE') or content['folder'] + '/rank_'}{content['rank']}")


flight_record = FlightRecord()
