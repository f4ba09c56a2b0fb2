"""The table of `distopt run --watch`: what its rows say, and a terminal that keeps it below all output."""

import fcntl
import json
import os
import selectors
import struct
import termios
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from distopt.launch.agents import monitor as watch
from distopt.launch.agents.monitor import Row, as_json, as_text, row_of
from distopt.launch.supervise.screen import Screen
from distopt.recorder.flight import FlightRecord
from distopt.recorder.ring import STEPS, NotedOperation
from tests.terminal import Terminal

ROWS, COLUMNS = 24, 60


def running(rank: int, **more) -> Row:
    values = {"steps": 100 + rank, "steps_per_s": 20.0, "wait_share": 0.2, "memory_bytes": (50 + rank) * 1_000_000}
    return Row(rank, "a", "running", **{**values, **more})


def waiting(rank: int, number: int, **more) -> Row:
    operation = NotedOperation("world", [0, 1, 2, 3, 4, 5, 6, 7], "all_reduce", number)
    return running(rank, waits=True, operation=operation, numbers={"world": number}, **more)


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ([3], "waiting for rank 3 in all_reduce #412"),
        ([3, 5], "waiting for ranks 3 and 5 in all_reduce #412"),
        ([1, 3, 5, 6, 7], "waiting for ranks 1, 3, 5 and 2 more in all_reduce #412"),
        ([], "waiting in all_reduce #412"),
    ],
)
def test_a_row_names_the_ranks_that_have_not_come(late, said):
    rows = [running(q, numbers={"world": 411}) if q in late else waiting(q, 412) for q in range(8)]
    words = watch.states(rows)
    assert words == {q: "running" if q in late else said for q in range(8)}


def test_rows_name_who_waits_for_whom_and_forget_absent_ranks():
    rows = [replace(waiting(0, 7), waits=None), running(1, numbers={"world": 7})]
    assert watch.states(rows)[0] == "running"
    for numbers in ({"world": 6, "another group": 9}, {}):
        assert watch.states([waiting(0, 7), running(1, numbers=numbers)])[0] == "waiting for rank 1 in all_reduce #7"
    assert watch.states([running(0, at=100.0), running(1, at=93.0)])[1] == "no report for 7 s"

    def slow(*shares: float | None) -> int | None:
        return watch.straggler([running(rank, wait_share=share) for rank, share in enumerate(shares)])

    assert (slow(0.4, 0.01, 0.5), slow(0.40, 0.37, 0.41), slow(0.4), slow(None, 0.4, 0.1)) == (1, None, None, 2)
    rows = [running(0, wait_share=0.4), running(1, wait_share=0.0)]
    assert watch.states(rows) == {0: "running", 1: "running; the others wait for it"}

    shown = []
    monitor = watch.Monitor(watch.Display("json", SimpleNamespace(write=shown.append)), "a")
    for rank in range(4):
        monitor.take(asdict(running(rank)))
    monitor.forget(3)
    monitor.report([SimpleNamespace(rank=0, pid=1, exit_code=0, ring=None)], at_the_end=True)
    assert [json.loads(line)["rank"] for line in b"".join(shown).splitlines()] == [0, 1, 2]


def test_a_table_of_64_ranks_fits_a_screen_of_24_lines():
    rows = [waiting(q, 9) if q in (17, 40) else running(q, numbers={"world": 9}) for q in range(64)]
    rows[50] = Row(50, "b", "was ended by SIGKILL")
    words = watch.states(rows)
    rows = [replace(row, state=words[row.rank]) for row in rows]
    shown = watch.table(rows, 80, 24)
    assert len(shown) <= 12
    assert all(len(line) < 80 for line in shown)
    assert [line.split()[0] for line in shown[1:-1]] == ["0", "1", "2", "3", "4", "5", "6", "17", "40", "50"]
    assert shown[-1] == "and 54 ranks more; of all 64: 20.0 steps/s, wait 0% to 20%"
    assert [line.split("MB  ")[1] for line in shown if " 17 " in line] == ["waiting in all_reduce #9"]
    assert [row.rank for row in watch.chosen(rows, 3)] == [17, 40, 50]
    assert len(watch.table(rows, 80, 300)) == 65
    heads = [watch.table(rows, columns, 24)[0].split() for columns in (90, 80, 70, 50, 40)]
    assert heads[0] == heads[1] == ["rank", "host", "steps", "steps/s", "samples/s", "wait", "memory", "state"]
    assert heads[-1] == ["rank", "steps/s", "wait", "state"]
    assert [len(head) for head in heads] == sorted((len(head) for head in heads), reverse=True)
    assert all(len(line) < 30 for line in watch.table(rows, 30, 24))


def test_text_and_json_of_a_row():
    row = running(3, samples_per_s=640.0, waits=True, pid=7)
    row.state = "waiting"
    text = "rank 3 on a: waiting, 103 steps, 20.0 steps/s, 640 samples/s, 20% of the time waiting, 53 MB"
    assert as_text(row) == text
    assert as_text(Row(0, "a", "ended")) == "rank 0 on a: ended"
    assert row_of(as_json(row).encode()) == replace(row, waits=False, at=pytest.approx(time.monotonic(), abs=60.0))
    assert [row_of(line) for line in (b"", b"step 1\n", b'{"time": 1}\n', b'{"time": 1, "loss": 2}\n')] == [None] * 4
    found = json.loads(as_json(row))
    assert found.pop("time") > 0
    rates = {"steps": 103, "steps_per_s": 20.0, "samples_per_s": 640.0, "wait_share": 0.2, "memory_bytes": 53_000_000}
    assert found == {"rank": 3, "pid": 7, "host": "a", "state": "waiting", **rates}


def test_the_rates_of_a_rank_that_has_ended_are_those_of_its_last_steps(monkeypatch):
    ring = SimpleNamespace(progress=[0] * 16, numbers=dict)  # a flight record
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def row(memory_bytes: int | None) -> Row:
        found = Row(0, "a", "running", memory_bytes=memory_bytes)
        meter._measure(found, ring, "")
        return found

    for saves, at_the_end, rates in ((30, 1.0, (None, pytest.approx(10.0))), (0, 4.0, (pytest.approx(10.0),))):
        meter = watch._Meter()
        for step in range(5):
            now, ring.progress[STEPS] = 100.0 + step, 10 * step
            assert row(1).steps == 10 * step
        for _ in range(saves):  # or leaves slowly
            now += 0.2
            row(1)
        now += at_the_end
        assert row(None).steps_per_s in rates


def test_the_memory_of_a_rank_tells_its_operations():
    record = FlightRecord()
    offer = record.offer()
    world, pair = record.open_group("world", range(4), 2, [offer]), record.open_group("pair", [2, 3], 2)
    ring = record._mine
    assert (ring.numbers(), ring.oldest(1 << 62)) == ({}, None)
    for number in range(1, 300):
        world.note("all_reduce", 0, 5, "", number)
        if number < 298:
            world.note_end(number)
    pair.note("broadcast", 0, 5, "", 1)
    assert ring.numbers() == {"world": 299, "pair": 1}
    assert ring.oldest(1 << 62) == NotedOperation("world", [0, 1, 2, 3], "all_reduce", 298)
    assert ring.oldest(0) is None
    world.note_end(298)
    world.note_end(299)
    assert ring.oldest(1 << 62) == NotedOperation("pair", [2, 3], "broadcast", 1)
    assert record.open_group("one", [2], 2) is None


class Shown:
    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.resize(ROWS, COLUMNS)
        self.terminal = Terminal(ROWS, COLUMNS)
        self.screen = Screen(slave, selectors.DefaultSelector(), pytest.fail)
        os.set_blocking(self._master, False)
        self._slave = slave

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def lines(self) -> list[str]:
        try:
            while True:
                self.terminal.feed(os.read(self._master, 1 << 16))
        except BlockingIOError:
            return self.terminal.lines

    def close(self) -> None:
        self.screen.close()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def shown() -> Iterator[Shown]:
    made = Shown()
    yield made
    made.close()


def test_output_scrolls_above_the_table(shown):
    assert shown.screen.size == (COLUMNS, ROWS)
    output = []
    for second in range(40):
        shown.screen.show([f"head {second}", f"row {second}"])
        assert shown.lines() == [*output, f"head {second}", f"row {second}"]
        shown.screen.write(f"line {second}\n".encode())
        output.append(f"line {second}")
        assert shown.lines() == output
        shown.screen.show()
    shown.screen.write(b"a-long-line" * 40 + b"\n")
    shown.screen.show()
    lines = shown.lines()
    assert "".join(lines[40:-2]) == "a-long-line" * 40
    assert lines[-2:] == ["head 39", "row 39"]
    shown.screen.leave()
    shown.screen.write(b"the end\n")
    shown.screen.show()
    assert shown.lines() == [*lines, "the end"]


def test_progress_bars_stay_above_the_table_in_one_line(shown):
    shown.screen.write(b"before\n")
    for percent in range(0, 100, 10):
        shown.screen.write(b"\r[rank 1] " + b"%d%% " % percent * 30 + b"\r")  # longer than the terminal is wide
        shown.screen.show(["head", "row"])
        before, bar, *rest = shown.lines()
        assert (before, rest) == ("before", ["head", "row"])
        assert bar.startswith(f"[rank 1] {percent}% ")
        shown.screen.write(b"\x1b[A\x1b[2K\r\x1b[3;1Hdone\r")  # as of a bar with a position
        shown.screen.show()
        assert shown.lines() == ["before", "done", "head", "row"]
    shown.screen.write(b"after\n")
    shown.screen.show()
    assert shown.lines() == ["before", "after", "head", "row"]


def test_rows_are_cut_to_the_size_of_a_terminal_that_changes_and_the_shell_in_between_stays(shown, monkeypatch):
    for _ in range(2):
        shown.screen.show(["x" * 100, "row"])
        assert shown.lines() == ["x" * COLUMNS, "row"]
    shown.resize(10, 40)
    assert shown.screen.size == (40, 10)
    shown.resize(0, 0)
    assert shown.screen.size == (80, 24)
    shown.screen.show(["head"])
    shown.lines()
    shown.terminal.feed(b"$ fg\n")  # of a suspended job
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    shown.screen.show(["head again"])
    assert shown.lines() == ["head", "$ fg", "head again"]
