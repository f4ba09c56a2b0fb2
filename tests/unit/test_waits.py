"""Over MPI, the ranks that a waiting rank accuses: those that do not report a wait, in any operation."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is absent: pip install mpi4py mpich", exc_type=ImportError)

from distopt.comm.net import waits
from distopt.comm.net.waits import Waits
from distopt.errors import Process, StalledError

TIMEOUT, WARNING = 10.0, 2.0
PROCESSES = [Process(rank, "host", 7) for rank in range(4)]


class Clock:
    now = 50.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Notes:
    """Rank 1 answers at once, rank 2 has stopped after its first answer, rank 3 never waits."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.told = clock, 0
        self.waiting: dict[int, float] = {}
        self.closed: dict[int, int] = {}
        self.failed: dict[int, StalledError] = {}
        self._heard = False

    def read(self) -> bool:
        heard, self._heard = self._heard, False
        return heard

    def send_failure(self, error: StalledError) -> None:
        assert not self.failed

    def send(self) -> None:
        self.told += 1
        self._heard = True
        self.waiting.update(dict.fromkeys([1, 2] if self.told == 1 else [1], self.clock.now))


class Core:
    quiet_seconds = 1.0
    warned = False
    last_agreed = "all_reduce #4"
    started = 6
    oldest = SimpleNamespace(sequence=5, unheard=[])

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait_on(self, operation: object, seconds: float) -> bool:
        self.clock.now += seconds
        return False

    def pause(self, quiet_seconds: float) -> None:
        self.clock.sleep(1e-3)

    def check_patience(self, patience: object, waited: float, tell, warn) -> None:
        text, late = tell()
        if waited > TIMEOUT:
            raise StalledError(text, ranks=late)
        if waited > WARNING + 0.2 and not self.warned:  # a rank that hears of the wait has so long to answer
            self.warned = True
            warn(text)


def test_who_is_accused(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(waits, "time", clock)
    monkeypatch.setattr(waits, "Stopwatch", lambda: SimpleNamespace(seconds=lambda: clock.now - 50.0))
    one = object.__new__(Waits)
    one._has_failed, one.abort_reason = False, ""
    one.processes, one._rank, one._notes = PROCESSES, 0, Notes(clock)
    one.settings = SimpleNamespace(timeout=TIMEOUT, stall_warning=WARNING)
    one.core, one._told = Core(clock), float("-inf")
    one._peers, one.help = SimpleNamespace(lost=lambda failed: None), lambda: None
    with caplog.at_level(logging.WARNING, "distopt"), pytest.raises(StalledError) as raised:
        one.wait_for(SimpleNamespace(sequence=5), None)
    (warning,) = caplog.messages
    assert " for rank 3 (host host, pid 7);" in warning
    assert " for rank 2 (host host, pid 7), rank 3 (host host, pid 7);" in str(raised.value)
    assert raised.value.ranks == tuple(PROCESSES[2:])
    assert one._notes.told <= 5  # no answers to answers without end
