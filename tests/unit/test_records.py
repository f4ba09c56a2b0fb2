"""Own states of lost ranks, put together from what ranks have written after a forward pass and at the end of a step."""

import json
import multiprocessing
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from distopt.checkpoint import live, records
from distopt.checkpoint.adapters import Adapter, InPlace, Random, State, generator_of
from distopt.checkpoint.live import Gifts
from distopt.checkpoint.plan import assembled, wanted_of
from distopt.checkpoint.records import MOST_BYTES, Arrivals, Records
from distopt.checkpoint.state_files import Held, Label, States, StateSlot, valid_word
from distopt.launch.heal.state_slots import N_RECORDS, StateSlots

SIZE = 3


class Shared(InPlace):
    """A model with one buffer that ranks do not share."""

    def shared(self, names):
        return set(names) - {"buffer"}


class Rank:
    """A rank that trains: numbers that are drawn depend on it, a schedule does not."""

    def __init__(self, rank: int) -> None:
        self.generator, self.schedule = np.random.default_rng(rank), {"rate": np.ones(1)}
        self.arrays: dict[str, np.ndarray[Any, Any]] = {"weight": np.zeros(5), "buffer": np.full(2, float(rank))}
        self.adapters: dict[str, Adapter] = {
            "model": Shared(self.arrays),
            "noise": Random(self.generator),
            "schedule": InPlace(self.schedule),
        }
        self.memory = StateSlots(1)
        self.slots = [StateSlot(files) for files in self.memory.places[0].records]
        self.records = Records(self.slots, rank)

    def forward(self, step: int) -> None:
        self.arrays["buffer"] += self.generator.random()
        self.records.write(Label(0, step, -1, SIZE), self.adapters, is_end=False)

    def finish(self, step: int, draws: bool = False) -> None:
        if draws:
            self.generator.random()
        self.schedule["rate"] *= 0.5
        self.records.write(Label(0, step, 2, SIZE), self.adapters, is_end=True)

    def held(self) -> list[Held]:
        return [held for slot in self.slots for held in slot.held]


def trained(last: int, draws: bool = False) -> list[Rank]:
    """Ranks that have done so many steps, but the last rank, which is lost after the forward pass of the last step."""
    ranks = [Rank(rank) for rank in range(SIZE)]
    for step in range(1, last + 1):
        for rank in ranks:
            rank.forward(step)
            if step < last or rank is not ranks[-1]:
                rank.finish(step, draws)
    return ranks


def test_a_rank_that_is_lost_after_its_forward_pass_has_done_the_step():
    ranks = trained(4)
    wanted = wanted_of(Label(0, 4, 2, SIZE), {}, [each for rank in ranks for each in rank.held()], in_shards=False)
    assert wanted is not None
    slots = [slot for rank in ranks for slot in rank.slots]
    kept = [held and States.read(next(slot.content() for slot in slots if slot.held == [held])) for held in wanted[2]]
    arrays, notes = assembled(*kept)
    ranks[2].finish(4)
    expected = States.read(ranks[2].slots[4 % N_RECORDS].content())
    assert arrays.keys() == {"model/buffer", "schedule/rate"}
    np.testing.assert_equal((arrays, notes), (expected.arrays, expected.notes))
    rank = Rank(0)
    rank.arrays["buffer"] = np.zeros(MOST_BYTES)
    rank.adapters["model"] = Shared(rank.arrays)
    rank.finish(1)
    assert (rank.records.fits, rank.held()) == (False, []), "large states are not written in each step"


@pytest.mark.parametrize("case", ["draws later", "first step", "no forward pass", "a schedule of its own"])
def test_states_that_cannot_be_known_are_not_made_up(case):
    ranks = trained(1 if case == "first step" else 4, draws=case == "draws later")
    held = [each for rank in ranks for each in rank.held()]
    if case == "no forward pass":
        held = [each for each in held if each.record["end"]]
    if case == "a schedule of its own":
        for each in held:
            each.record["before"]["schedule"] += each.writer[0]
    step = 1 if case == "first step" else 4
    assert wanted_of(Label(0, step, 2, SIZE), {}, held, in_shards=False) is None
    in_shards = wanted_of(Label(0, step, 2, SIZE), {}, held, in_shards=True)
    assert in_shards is not None
    assert [each.own is None for each in in_shards] == [False, False, True]


@pytest.fixture
def files() -> Iterator[list[int]]:
    fds = [os.memfd_create("test") for _ in range(3)]
    yield fds
    for fd in fds:
        os.close(fd)


def states(step: int) -> dict[str, np.ndarray[Any, Any]]:
    return {f"model/{i}": np.arange(100.0 * i).reshape(-1, 10) + step for i in range(20)}


def test_ranks_write_one_file_of_live_states_together(files):
    """The lock of a file is a process's: threads would hold it together."""
    context = multiprocessing.get_context("fork")
    for step in range(20):
        label, begin = Label(1, step, 0, 2), context.Barrier(2)

        def give(place: int, label: Label = label, begin: Any = begin) -> None:
            begin.wait()
            Gifts(files).write(label, states(label.step), {"model": {"a": 1}}, place)

        ranks = [context.Process(target=give, args=(place,)) for place in (0, 10)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0, 0]
        gifts = Gifts(files)
        assert label in [held.label for held in gifts.held(0)]
        np.testing.assert_equal(gifts.read(label), (states(step), {"model": {"a": 1}}))


def test_a_rank_at_another_step_and_one_that_has_resumed_spare_the_file(files):
    first = Gifts(files)
    first.write(Label(0, 7, 0, 2), states(7), {}, 0)
    first.write(Label(0, 8, 0, 2), states(8), {}, 0)
    again = Gifts(files)
    assert {held.label.step for held in again.held(0)} == {7, 8}
    assert again.read(Label(0, 7, 0, 2)) is not None
    for step in (7, 8):
        again.write(Label(1, step, 0, 2), states(step), {}, 0)
        assert again.read(Label(0, 7, 0, 2)) is not None


def test_a_file_that_its_writers_have_not_finished_does_not_count(files, monkeypatch):
    left = iter(range(14))  # writes before the end of the writer

    def fail(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        next(left)
        return array

    monkeypatch.setattr(live, "on_host", fail)
    with pytest.raises(StopIteration):
        Gifts(files).write(Label(0, 7, 0, 2), states(7), {}, 0)
    monkeypatch.undo()
    assert Gifts(files).held(0) == []
    Gifts(files).write(Label(0, 7, 0, 2), states(7), {}, 5)  # another rank writes the rest
    assert [held.label.step for held in Gifts(files).held(0)] == [7]


@pytest.mark.parametrize("kind", ["python", "numpy", "MT19937", "Philox", "SFC64", "PCG64", "PCG64DXSM"])
def test_generators_go_on_from_arrays_and_from_lists_of_older_files(kind):
    made = {"python": lambda: random.Random(3), "numpy": lambda: np.random.RandomState(3)}
    make = made.get(kind, lambda: np.random.Generator(getattr(np.random, kind)(3)))

    def draw(generator):
        return generator.random() if kind in made else generator.integers(0, 2**31, dtype=np.int32)

    generator = make()
    draw(generator)  # leaves half a word behind
    state = generator_of(generator).snapshot()
    if kind == "python":
        lists = list(generator.getstate())
    else:
        of_numpy = generator.get_state(legacy=False) if kind == "numpy" else generator.bit_generator.state
        lists = json.loads(json.dumps(of_numpy, default=lambda array: array.tolist()))
    expected = [draw(generator) for _ in range(3)]
    for given in (state, State({}, {"": lists})):
        other = make()
        adapter = generator_of(other)
        adapter.check(given)
        adapter.put(given)
        assert [draw(other) for _ in range(3)] == expected


class Clock:
    """In the place of `time`: a sleep is over at once."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_an_update_waits_for_the_records_of_the_node_before(monkeypatch: pytest.MonkeyPatch):
    """Of two ranks there; for one percent of the time."""
    clock = Clock()
    monkeypatch.setattr(records, "time", clock)
    words = memoryview(bytearray(8 * 2 * N_RECORDS)).cast("Q")
    arrivals = Arrivals(words)

    def waited(step: int, over_at: float = float("inf")) -> float:
        begin = clock.now
        arrivals.wait(step, 2, lambda: clock.now >= over_at)
        return clock.now - begin

    words[7 % N_RECORDS] = valid_word(7)
    assert waited(7, over_at=0.5) == pytest.approx(0.5, abs=0.01)  # for the second rank
    words[N_RECORDS + 7 % N_RECORDS] = valid_word(7, is_end=True)
    assert (waited(7), waited(8)) == (0.0, 0.0)  # waits have taken too long
    clock.now += 100.0
    assert waited(8) == pytest.approx(6.0, abs=0.01)
    clock.now += 100.0
    assert waited(8) == 0.0
    words[8 % N_RECORDS] = words[N_RECORDS + 8 % N_RECORDS] = valid_word(8)
    clock.now += 700.0
    assert waited(8) == 0.0
