"""Small messages between ranks that wait long or leave, so that the others can name the ranks they wait for."""

from __future__ import annotations

import json
import threading
import time

import numpy as np

from ... import _core, errors
from ...errors import CommunicatorError, Process

_FAREWELL_SECONDS = 1.0  # then a rank that exits stops waiting for the others to close their communicators
_WAITING, _FAILED = -1, -2  # in place of the number of collectives that a leaving rank has finished
_MOST_BYTES = 4096
_TAG = 0


class Notes:
    """One rank's notes to and from the others.

    Args:
        transport: carries nothing else.
        rank: of this process.
        size: number of ranks.

    Attributes:
        waiting: when a rank was last heard to wait, on the clock of `time.monotonic`, by rank.
        closed: by rank, the number of collectives that it had finished when it closed.
        failed: by rank, the error that it has raised.
    """

    def __init__(self, transport: _core.Transport, rank: int, size: int) -> None:
        self._channel = _core.NetChannel(transport)
        self._others = [other for other in range(size) if other != rank]
        self._lock = threading.Lock()
        self.waiting: dict[int, float] = {}
        self.closed: dict[int, int] = {}
        self.failed: dict[int, CommunicatorError] = {}

    def send(self, finished: int = _WAITING) -> None:
        """Local. Send all others a note: this rank waits, or it leaves after `finished` collectives."""
        self._send(np.array([finished], np.int64).tobytes())

    def send_failure(self, error: CommunicatorError) -> None:
        """Local. Send all others a note: this rank raises `error`, and uses the communicator no more."""
        fields = [type(error).__name__, error.fact[: _MOST_BYTES // 4], error.cure, error.ranks]
        self._send(np.array([_FAILED], np.int64).tobytes() + json.dumps(fields).encode())

    def _send(self, content: bytes) -> None:
        note = np.frombuffer(content[:_MOST_BYTES], np.uint8)
        for other in self._others:
            self._channel.send(note, other, _TAG)

    def read(self) -> bool:
        """Local. Read the notes that have arrived; return whether one says that a rank waits."""
        asked = False
        if not self._lock.acquire(blocking=False):  # another thread does it
            return False
        try:
            self._channel.poll()
            while (source := self._channel.probe(_TAG)) >= 0:
                note = np.zeros(_MOST_BYTES, np.uint8)
                transfer = self._channel.receive(note, source, _TAG)
                while not transfer.done:
                    self._channel.poll()
                said = int(note[:8].view(np.int64)[0])
                if said == _WAITING:
                    self.waiting[source] = time.monotonic()
                    asked = True
                elif said == _FAILED:
                    self._take_failure(source, note[8:].tobytes().rstrip(b"\0"))
                else:
                    self.closed[source] = said
        finally:
            self._lock.release()
        return asked

    def _take_failure(self, source: int, content: bytes) -> None:
        try:
            kind, fact, cure, ranks = json.loads(content)
        except ValueError:  # it is longer than a note
            return
        self.failed[source] = getattr(errors, kind)(fact, cure=cure, ranks=[Process(*one) for one in ranks])

    def read_last(self) -> None:
        """Local. Read the notes of ranks that leave, for a moment: UCX warns of messages that were never received."""
        end = time.monotonic() + _FAREWELL_SECONDS
        while len(self.closed) < len(self._others) and time.monotonic() < end:
            self.read()
            time.sleep(1e-4)
