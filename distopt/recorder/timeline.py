"""The timeline of a rank: the time that each part of a training step takes, in a file that trace viewers open.

`DISTOPT_TIMELINE=FOLDER` turns it on for any script. Under `distopt run --watch`, the same functions count steps,
samples and waits, for a table. Otherwise they do nothing. A file is an array in Chrome's trace format, without its last
bracket, so it is valid whenever the process ends. Times are those of the monotonic clock, which the processes of a host
share; the first event says how far the clocks of two hosts are apart. `distopt timeline merge FOLDER` makes one trace
of all files.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import Settings
from .flight import flight_record
from .ring import COPIES, SAMPLES, SAVES, STEPS, WAITED, WAITS_SINCE

if TYPE_CHECKING:
    from io import FileIO

_log = logging.getLogger("distopt")
TRACKS = 1000  # numbers of tracks for each rank
_FLUSH_SECONDS = 0.5  # between two writes: as much is lost when a process is killed
_ROUNDS = 24  # exchanges to compare the clocks of two hosts
# How many times Slurm has started the job before, and torchrun or `distopt run` its ranks.
_ATTEMPTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_STATES = {"copy states": COPIES, "save": SAVES}
_now = time.perf_counter  # the monotonic clock on Linux, which csrc/base/flight.h reads, too


class Timeline:
    """The timeline of this process.

    Attributes:
        is_on: whether events are recorded or counted.
        phase_now: the phase that the training step is in.
    """

    is_on = False
    phase_now = ""
    _began = _flushed = 0.0
    _file: FileIO | None = None
    _progress: memoryview | None = None  # where events are counted: see `distopt.recorder`

    def open(
        self,
        rank: int,
        hosts: Sequence[str],
        exchange: Callable[[bytes], list[bytes]],
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        """Collective if $DISTOPT_TIMELINE is set, else local. Begin what is wanted, unless this process has before.

        Args:
            rank: of this process in the job.
            hosts: host name of every rank that takes part, that of the job's rank 0 first.
            exchange: gives every rank the bytes of every rank, in the order of `hosts`.
            begin: called if it begins.
        """
        settings, has_begun = Settings.from_env(), self.is_on
        if settings.timeline is not None:
            low, high = _clock(exchange) if len(set(hosts)) > 1 else (0, 0)
            if not has_begun:
                self._open_file(settings.timeline, rank, (0, 0) if os.uname().nodename == hosts[0] else (low, high))
        if not has_begun:
            self._progress = flight_record.progress if settings.watch else None
            self.is_on = self._file is not None or self._progress is not None
            if self.is_on:
                begin()

    def _open_file(self, folder: str, rank: int, lead_ns: tuple[int, int]) -> None:
        # Viewers take a process or a track of number 0 for the kernel's.
        self._number, self._tracks, self._pid = rank + 1, {"": TRACKS * (rank + 1)}, os.getpid()
        self._lines = ["["]
        low, high = lead_ns
        about = {"rank": rank, "host": os.uname().nodename, "low_ns": low, "high_ns": high, "began": time.time()}
        about["attempt"] = [int(os.environ.get(name) or 0) for name in _ATTEMPTS]
        self._write("clock", "", ph="M", args=about)
        self._write("thread_name", "", ph="M", args={"name": "training"})
        with self._writing():
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = Path(folder, f"rank-{rank}-{self._pid}.json").open("wb", buffering=0)  # noqa: SIM115
            self._flush()
            atexit.register(self._flush)

    def phase(self, name: str) -> None:
        """The training step enters this phase, and leaves the one before; "" is none."""
        if self.is_on:
            now = _now()
            if self.phase_now:
                self.add(self.phase_now, self._began, now)
            self.phase_now, self._began = name, now
            if name == "update":
                self._count(STEPS, 1)

    @contextlib.contextmanager
    def span(self, name: str, track: str = "") -> Iterator[None]:
        """A context for work on a checkpoint, which is one bar.

        Args:
            name: "copy states" or "save".
            track: the line of the bar; that of training by default.
        """
        began = _now()
        self._count(_STATES[name], 1)
        try:
            yield
        finally:
            self._count(_STATES[name], -1)
            self.add(name, began, _now(), track)

    @contextlib.contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """A context for a wait for other ranks, which is a bar of that name."""
        began = self.begin_wait()
        try:
            yield
        finally:
            self.end_wait(name, began, _now())

    def begin_wait(self) -> float:
        """This rank begins to wait for others; the time, for `end_wait`."""
        now = _now()
        if self._progress is not None:
            self._progress[WAITS_SINCE] = int(now * 1e9)
        return now

    def end_wait(self, name: str, began: float, ended: float, **details: object) -> None:
        """This rank has waited for others; see `add`."""
        if self._progress is not None:
            self._progress[WAITED] += int((ended - began) * 1e9)
            self._progress[WAITS_SINCE] = 0
        self.add(name, began, ended, "", **details)

    def trained_on(self, inputs: Iterable[Any]) -> None:
        """A training step computes on these inputs; the rows of the first array among them are its samples."""
        if self._progress is not None:
            self._count(SAMPLES, next((each.shape[0] for each in inputs if getattr(each, "shape", ())), 0))

    def _count(self, word: int, more: int) -> None:
        if self._progress is not None:
            self._progress[word] += more

    def add(self, name: str, began: float, ended: float, track: str = "", **details: object) -> None:
        """Record what took from `began` to `ended`, in seconds of `time.perf_counter`."""
        if self._file is None:
            return
        if track not in self._tracks:
            self._tracks[track] = self._tracks[""] + len(self._tracks)
            self._write("thread_name", track, ph="M", args={"name": track})
        # Whole microseconds: viewers round fractions so that one bar may end after the next has begun.
        begin, end = round(began * 1e6), round(max(began, ended) * 1e6)
        self._write(name, track, ph="X", ts=begin, dur=end - begin, args=details)
        if ended - self._flushed > _FLUSH_SECONDS:
            self._flush()

    def _write(self, name: str, track: str, **event: object) -> None:
        self._lines.append(json.dumps({"name": name, "pid": self._number, "tid": self._tracks[track], **event}) + ",")

    def _flush(self) -> None:
        if self._file is not None and os.getpid() == self._pid:  # not in a forked child
            lines, self._lines, self._flushed = self._lines, [], _now()
            with self._writing():
                self._file.write("\n".join([*lines, ""]).encode())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file, self.is_on = None, self._progress is not None
            _log.warning("the timeline cannot be written: %s; training goes on", error)


def _clock(exchange: Callable[[bytes], list[bytes]]) -> tuple[int, int]:
    """Collective. Bounds of this clock's lead over the first rank's, in ns.

    Nothing arrives before it was sent. So the lead is at most the difference between an arrival here and the sending
    there, and at least that between a sending here and the arrival there; the fastest exchanges leave the least room.
    """
    low, high, sent, arrived = -(1 << 62), 1 << 62, 0, 0
    for number in range(_ROUNDS):
        before, sent = sent, time.monotonic_ns()
        sent_there, arrived_there = struct.unpack("=qq", exchange(struct.pack("=qq", sent, arrived))[0])
        arrived = time.monotonic_ns()
        high = min(high, arrived - sent_there)
        low = max(low, before - arrived_there) if number else low
    return low, high


timeline = Timeline()
