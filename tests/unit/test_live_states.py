"""How long ranks may take to give their live states: a clock that the test sets, ranks that write or do not."""

import os
import selectors
from typing import Any

import pytest

from distopt.launch.agents import warm as module
from distopt.launch.agents.options import RunOptions
from distopt.launch.agents.warm import WarmStart
from distopt.launch.heal.state_slots import seconds_to_give

N_BYTES = 1_000_000_000
EXPECTED = seconds_to_give(N_BYTES)  # 4 s


class Clock:
    now = 0.0

    def seconds(self) -> float:
        return self.now


class Rank:
    def __init__(self, n_bytes: int) -> None:
        self.said: dict[str, Any] = {"gives": {"bytes": n_bytes}} if n_bytes else {}
        self.killed = False

    def kill(self) -> None:
        self.killed = True


class Ranks:
    """Two that have said how much they give, and one that cannot."""

    def __init__(self) -> None:
        self.ranks = [Rank(N_BYTES), Rank(N_BYTES // 2), Rank(0)]
        self.stopped: list[Rank] = []

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.killed]


@pytest.fixture
def warm():
    made = WarmStart(RunOptions(("python",), ranks=3, heal=True), selectors.DefaultSelector(), print, bytes(32), None)
    made._clock = Clock()
    yield made
    made.close()


def write(warm: WarmStart, n_pages: int) -> None:
    """Ranks write: so many pages of a file of live states are in memory."""
    os.pwrite(warm.state_slots.fds.gifts[1], b"x" * (4096 * n_pages), 0)


def look(warm: WarmStart, ranks: Ranks, now: float) -> list[bool]:
    warm._clock.now = now
    warm.look(ranks)
    return [rank.killed for rank in ranks.ranks]


def test_ranks_that_write_nothing_are_killed_after_the_expected_time(warm: WarmStart) -> None:
    ranks = Ranks()
    assert warm.ask(ranks) == module._SLOWER * EXPECTED  # the longest, for the owner
    assert look(warm, ranks, EXPECTED - 0.01) == [False, False, True]
    assert look(warm, ranks, EXPECTED) == [True, True, True]


def test_ranks_that_write_have_longer_but_not_for_ever(warm: WarmStart) -> None:
    ranks, pages = Ranks(), 1
    warm.ask(ranks)
    now = EXPECTED
    while now < module._SLOWER * EXPECTED:
        write(warm, pages)
        assert look(warm, ranks, now) == [False, False, True], now
        now, pages = now + module._WRITING_SECONDS, pages + 1
    write(warm, pages)
    assert look(warm, ranks, module._SLOWER * EXPECTED) == [True, True, True]


def test_ranks_that_stop_to_write_are_killed_soon(warm: WarmStart) -> None:
    ranks = Ranks()
    warm.ask(ranks)
    write(warm, 1)
    assert look(warm, ranks, EXPECTED) == [False, False, True]
    assert look(warm, ranks, EXPECTED + module._WRITING_SECONDS - 0.01) == [False, False, True]
    assert look(warm, ranks, EXPECTED + module._WRITING_SECONDS) == [True, True, True]


def test_ranks_that_gave_or_are_stopped_are_killed_at_once(warm: WarmStart) -> None:
    ranks = Ranks()
    warm.ask(ranks)
    ranks.ranks[1].said["gave"] = {}
    assert look(warm, ranks, 0.1) == [False, True, True]
    ranks.stopped = [ranks.ranks[0]]
    assert look(warm, ranks, 0.2) == [True, True, True]


def test_a_second_request_grants_no_more_time(warm: WarmStart) -> None:
    """As when a node is lost while the ranks give."""
    ranks = Ranks()
    warm.ask(ranks)
    warm._clock.now = EXPECTED - 0.01
    warm.ask(ranks)
    assert look(warm, ranks, EXPECTED) == [True, True, True]
