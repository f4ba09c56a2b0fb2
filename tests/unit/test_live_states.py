"""How long ranks may take to give their live states: a clock that the test sets, ranks that write or do not."""

import os
import selectors
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distopt.launch.agents import warm as module
from distopt.launch.agents.options import RunOptions
from distopt.launch.agents.warm import WarmStart
from distopt.launch.heal.state_slots import seconds_to_give

N_BYTES = 1_000_000_000
EXPECTED = seconds_to_give(N_BYTES)  # 4 s
MOST, WRITING = module._SLOWER * EXPECTED, module._WRITING_SECONDS


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
def asked():
    """What starts ranks, which have been asked once for their live states, and these ranks."""
    made = WarmStart(RunOptions(("python",), ranks=3, heal=True), selectors.DefaultSelector(), print, bytes(32), None)
    made._clock, ranks = SimpleNamespace(seconds=lambda: made._clock.now, now=0.0), Ranks()
    assert made.ask(ranks) == MOST  # the longest, for the owner
    yield made, ranks
    made.close()


def looks(warm: WarmStart, ranks: Ranks, *looked: tuple[float, str]) -> list[int]:
    """How many ranks have been killed at each of these times, once the ranks have written, or been asked again."""
    killed = []
    for i, (warm._clock.now, before) in enumerate(looked, 1):
        if before == "write":  # so many pages of a file of live states are in memory
            os.pwrite(warm.state_slots.fds.gifts[1], b"x" * (4096 * i), 0)
        elif before == "ask":
            warm.ask(ranks)
        warm.look(ranks)
        killed.append(sum(rank.killed for rank in ranks.ranks))
    return killed


@pytest.mark.parametrize(
    "looked",
    [
        pytest.param([(EXPECTED - 0.01, ""), (EXPECTED, "")], id="write nothing"),
        # As when a node is lost while the ranks give: it grants no more.
        pytest.param([(EXPECTED - 0.01, ""), (EXPECTED, "ask")], id="are asked again"),
        pytest.param([(time, "write") for time in (*np.arange(EXPECTED, MOST, WRITING), MOST)], id="write for ever"),
        pytest.param([(EXPECTED, "write"), (EXPECTED + WRITING - 0.01, ""), (EXPECTED + WRITING, "")], id="stop"),
    ],
)
def test_ranks_are_killed_at_the_last_of_these_looks(asked, looked) -> None:
    assert looks(*asked, *looked) == [1] * (len(looked) - 1) + [3]  # the one that cannot is killed at once


def test_ranks_that_gave_or_are_stopped_are_killed_at_once(asked) -> None:
    warm, ranks = asked
    ranks.ranks[1].said["gave"] = {}
    assert looks(warm, ranks, (0.1, "")) == [2]
    assert not ranks.ranks[0].killed
    ranks.stopped = [ranks.ranks[0]]
    assert looks(warm, ranks, (0.2, "")) == [3]
