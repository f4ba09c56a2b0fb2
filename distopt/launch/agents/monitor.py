"""`distopt run --watch`: once a second, what each rank does.

A rank's steps, waits and operations lie in its flight record, which its agent can read (`distopt.recorder`). So a rank
sends nothing, and one that hangs is shown, too. Agents send the rows of their ranks to the owner of the endpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from ...recorder.ring import COPIES, SAMPLES, SAVES, STEPS, WAITED, WAITS_SINCE, NotedOperation, Ring
from ..processes import describe_exit, stat_of
from ..supervise.output import Output
from ..supervise.ranks import Rank
from ..supervise.screen import Screen

_PERIOD = 1.0  # seconds between two looks
_LOOKS = 11  # to keep: rates are means over the time between the first and the last of them
_LONGEST_PAUSE = 60.0  # between the lines of a log
_WAITING = 0.5  # seconds of a wait that are worth a word
_IDLE = 0.3  # share of a core: a rank that uses less computes nothing
_MUCH = 0.05  # of the time
_NAMED = 3  # ranks
_LATE = 3.0  # seconds without a row of a rank
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Row:
    """The activity of a rank.

    Attributes:
        rank: its number in the job.
        host: where it runs.
        state: in a few words.
        memory_bytes: resident; None once it has ended.
        steps: of training that this process has begun; None without a report of it.
        steps_per_s: over the last seconds.
        samples_per_s: over the last seconds; None if unknown.
        wait_share: of the last seconds in which it waited for other ranks.
        waits: whether it waits now: True, or None if it may.
        operation: its oldest one that has not ended, if it waits or may.
        numbers: of the last operation, by group.
        at: when the row was made or has arrived, by `time.monotonic`.
        pid: of the process.
        worker: number of its worker, under --workers.
    """

    rank: int
    host: str
    state: str
    memory_bytes: int | None = None
    steps: int | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    wait_share: float | None = None
    waits: bool | None = False
    operation: NotedOperation | None = None
    numbers: dict[str, int] = field(default_factory=dict)
    at: float = 0.0
    pid: int = 0
    worker: int | None = None


class _Meter:
    """Makes the rows of a rank."""

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._looks: deque[tuple[float, ...]] = deque(maxlen=_LOOKS)
        self._cpu = (0.0, 0.0)  # time of the last look, and the rank's seconds of computing until then

    def row(self, rank: Rank, host: str, beginning: str) -> Row:
        """The present activity of the rank; `beginning` is its state until its first step."""
        row = Row(rank.rank, host, "running", at=time.monotonic(), pid=rank.pid)
        idle = False
        if rank.exit_code is not None:
            row.state = describe_exit(rank.exit_code)[1].partition(";")[0] if rank.exit_code else "ended"
        else:
            fields = stat_of(rank.pid)
            row.memory_bytes = int(fields[21]) * _PAGE_BYTES or None
            (before, used), self._cpu = self._cpu, (row.at, (int(fields[11]) + int(fields[12])) / _TICKS)
            idle = self._cpu[1] - used < _IDLE * (row.at - before)
            if fields[0] in "Tt":
                row.state = "stopped"
        if rank.ring is None:
            row.state = beginning if row.state == "running" and beginning else row.state
            return row
        if rank.ring is not self._ring:
            self._ring = rank.ring
            self._looks.clear()
        self._measure(row, rank.ring, beginning)
        if row.state == "running":
            self._look_for_waits(row, rank.ring, idle)
        return row

    def _measure(self, row: Row, ring: Ring, beginning: str) -> None:
        words, now = ring.progress, time.perf_counter()
        waited = words[WAITED] / 1e9
        if words[WAITS_SINCE]:
            waited += max(now - words[WAITS_SINCE] / 1e9, 0.0)
        looks, ended = self._looks, row.memory_bytes is None
        if not (ended and looks and looks[-1][1] == words[STEPS]):
            looks.append((now, words[STEPS], words[SAMPLES], waited))
        while ended and len(looks) > 2 and looks[-1][1] == looks[-2][1]:  # its rates are those of its steps
            looks.pop()
        first = looks[0]
        row.steps, row.numbers = words[STEPS], ring.numbers()
        if row.state == "running" and words[COPIES] + words[SAVES]:
            row.state = "saving"
        elif row.state == "running" and beginning and not row.steps:
            row.state = beginning
        if len(looks) > 1 and not (ended and looks[-1][1] == first[1]):
            row.steps_per_s, samples, row.wait_share = (
                (last - before) / (looks[-1][0] - first[0])
                for last, before in zip(looks[-1][1:], first[1:], strict=True)
            )
            row.samples_per_s = samples if words[SAMPLES] else None

    def _look_for_waits(self, row: Row, ring: Ring, idle: bool) -> None:
        since = ring.progress[WAITS_SINCE]
        if since and time.perf_counter() - since / 1e9 > _WAITING:
            row.waits = True
        elif idle:  # it may wait where the script calls a communicator by hand
            row.waits = None
        if row.waits is not False:
            row.operation = ring.oldest(time.monotonic_ns() - int(_WAITING * 1e9))


class Display:
    """Shows rows whose states are in words.

    Args:
        kind: "table", or "json" for lines of JSON; where there is no `Screen`, a table is lines of text.
        output: where they go.
    """

    def __init__(self, kind: str, output: Output) -> None:
        self._kind, self._output = kind, output
        self._look_at = self._show_at = 0.0
        self._pause = _PERIOD

    def is_due(self, *, at_the_end: bool) -> bool:
        """Whether to look now, once a second and `at_the_end`; otherwise, the table is drawn again below new output."""
        now = time.monotonic()
        if now >= self._look_at or at_the_end:
            self._look_at = max(self._look_at + _PERIOD, now + _PERIOD / 2)
            return True
        if isinstance(self._output, Screen):
            self._output.show()
        return False

    def show(self, rows: Sequence[Row], *, at_the_end: bool, summary: Mapping[str, Any] | None = None) -> None:
        """Show the rows, and below them a summary, whose "text" is for readers; `at_the_end`, let the table stand."""
        facts = dict(summary or {})
        texts = [text] if (text := facts.pop("text", "")) else []
        now = time.monotonic()
        if self._kind == "json":
            lines = [as_json(row) for row in rows] + ([_stamped(facts)] if facts else [])
            self._output.write("".join(lines).encode())
        elif isinstance(self._output, Screen):
            columns, n_lines = self._output.size
            self._output.show([*table(rows, columns, n_lines), *(text[: columns - 1] for text in texts)])
            if at_the_end:
                self._output.leave()
        elif now >= self._show_at or at_the_end:
            self._show_at, self._pause = now + self._pause - _PERIOD / 2, min(2 * self._pause, _LONGEST_PAUSE)
            lines = [f"distopt run: {text}\n" for text in [*map(as_text, rows), *texts]]
            self._output.write("".join(lines).encode())


class Monitor:
    """Shows all rows, or sends those of this node.

    Args:
        display: shows them.
        host: of this node.
    """

    def __init__(self, display: Display, host: str) -> None:
        self._display, self._host = display, host
        self._meters: dict[int, _Meter] = {}
        self._rows: dict[int, Row] = {}

    def report(
        self,
        ranks: Iterable[Rank],
        beginning: str = "",
        send: Callable[[dict[str, Any]], None] | None = None,
        *,
        at_the_end: bool = False,
    ) -> None:
        """Once a second, show the rows of all ranks that are known, or send those of this node.

        Args:
            ranks: of this node.
            beginning: the state of a rank that has done no step yet.
            send: sends a row to the owner, which shows it.
            at_the_end: the job has ended: look now, and let the table stand.
        """
        if self._display.is_due(at_the_end=at_the_end):
            rows = [self._meters.setdefault(rank.rank, _Meter()).row(rank, self._host, beginning) for rank in ranks]
            for row in rows:
                if send is not None:
                    send({"say": "watch", "row": asdict(row)})
                self._rows[row.rank] = row
            if send is None and rows:
                known = [self._rows[rank] for rank in sorted(self._rows)]
                words = states(known)
                known = [replace(row, state=words[row.rank]) for row in known]
                self._display.show(known, at_the_end=at_the_end)

    def forget(self, n_ranks: int) -> None:
        """Drop the rows of ranks from this number on, which no longer exist."""
        self._rows = {rank: row for rank, row in self._rows.items() if rank < n_ranks}

    def take(self, row: dict[str, Any]) -> None:
        """A row of another node."""
        operation = row.pop("operation")
        taken = Row(**row, operation=operation and NotedOperation(*operation))
        taken.at = time.monotonic()
        self._rows[taken.rank] = taken


# -- what rows say ---------------------------------------------------------------------------------------------------
def states(rows: Sequence[Row]) -> dict[int, str]:
    """The states of ranks in words: which others they wait for, and which one the others wait for."""
    numbers = {row.rank: row.numbers for row in rows}
    said, now = {row.rank: row.state for row in rows}, max(row.at for row in rows)
    for row in rows:
        if silent := silence(row, now):
            said[row.rank] = silent
        elif row.operation is not None:
            group, ranks, kind, number = row.operation
            missing = [q for q in ranks if q in numbers and numbers[q].get(group, -1) < number]
            if missing:
                said[row.rank] = f"waiting for {_names(missing)} in {kind} #{number}"
            elif row.waits:
                said[row.rank] = f"waiting in {kind} #{number}"
        elif row.waits:
            said[row.rank] = "waiting"
    if (slow := straggler(rows)) is not None and said[slow] == "running":
        said[slow] += "; the others wait for it"
    return said


def silence(row: Row, now: float) -> str:
    """The state of a rank that has not ended but has sent no row for long; else empty."""
    is_late = row.memory_bytes is not None and now - row.at > _LATE
    return f"no report for {now - row.at:.0f} s" if is_late else ""


def straggler(rows: Sequence[Row]) -> int | None:
    """The rank that waits least, if the others wait for much of their time, and it does not."""
    shares = {row.rank: row.wait_share for row in rows if row.wait_share is not None}
    if len(shares) < 2:
        return None
    slow = min(shares, key=shares.__getitem__)
    return slow if median(share for rank, share in shares.items() if rank != slow) - shares[slow] > _MUCH else None


def _names(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"


def listed(numbers: Sequence[int]) -> str:
    """Numbers in words; of many, the first ones."""
    if len(numbers) == 1:
        return str(numbers[0])
    more = len(numbers) - _NAMED
    first, last = (numbers[:_NAMED], f"{more} more") if more > 0 else (numbers[:-1], str(numbers[-1]))
    return f"{', '.join(map(str, first))} and {last}"


def as_json(row: Row) -> str:
    """A row as a line of JSON, with the time and without private fields."""
    hidden = {"waits", "operation", "numbers", "at", *(["worker"] if row.worker is None else [])}
    shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(row).items()}
    return _stamped({key: value for key, value in shown.items() if key not in hidden})


def _stamped(facts: Mapping[str, Any]) -> str:
    return json.dumps({"time": round(time.time(), 3), **facts}) + "\n"


def row_of(line: bytes) -> Row | None:
    """The inverse of `as_json`; None for another line."""
    with suppress(ValueError, TypeError):
        facts = json.loads(line) if line.startswith(b'{"time": ') else {}
        if facts.pop("time", None) is not None:
            return Row(**facts, at=time.monotonic())
    return None


def as_text(row: Row) -> str:
    """A line for a log."""
    units = ("{} steps", "{:.1f} steps/s", "{:.0f} samples/s", "{:.0%} of the time waiting", "{:.0f} MB")
    parts = [unit.format(value) for value, unit in zip(_figures(row), units, strict=True) if value is not None]
    worker = "" if row.worker is None else f"worker {row.worker}, "
    return ", ".join([f"{worker}rank {row.rank} on {row.host}: {row.state}", *parts])


_LESS = ("memory", "samples/s", "host", "steps")  # columns that a narrow terminal goes without, the first one first
_COLUMNS = ("worker", "rank", "host", "steps", "steps/s", "samples/s", "wait", "memory", "state")


def table(rows: Sequence[Row], columns: int, lines: int) -> list[str]:
    """The rows below a heading, cut to the width of a terminal of that size; they fill less than half of it."""
    room = max(lines // 2 - 2, 1)
    cells = [_COLUMNS, *map(_cells, chosen(rows, room))]
    upright = {head: [head, *column] for head, *column in zip(*cells, strict=True)}
    if all(row.worker is None for row in rows):
        del upright["worker"]
    widths = {head: max(map(len, column)) for head, column in upright.items()}
    for head in _LESS:
        if sum(widths.values()) + 2 * len(widths) > columns:
            del upright[head], widths[head]
    for head, column in upright.items():
        on_the_left = head in ("host", "state")
        upright[head] = [cell.ljust(widths[head]) if on_the_left else cell.rjust(widths[head]) for cell in column]
    shown = ["  ".join(row).rstrip() for row in zip(*upright.values(), strict=True)]
    if len(rows) > room:
        pace = median(row.steps_per_s or 0.0 for row in rows)
        waits = [row.wait_share or 0.0 for row in rows]
        span = f"wait {min(waits):.0%} to {max(waits):.0%}"
        shown.append(f"and {len(rows) - room} ranks more; of all {len(rows)}: {pace:.1f} steps/s, {span}")
    return [line[: columns - 1] for line in shown]


def chosen(rows: Sequence[Row], room: int) -> list[Row]:
    """As many rows as there is room for, in their order: first those whose state differs from "running"."""
    first = sorted(range(len(rows)), key=lambda i: (rows[i].state == "running", i))[:room]
    return [rows[i] for i in sorted(first)]


def _cells(row: Row) -> tuple[str, ...]:
    forms = ("{}", "{:.1f}", "{:.0f}", "{:.0%}", "{:.0f} MB")
    shown = ["-" if value is None else form.format(value) for value, form in zip(_figures(row), forms, strict=True)]
    worker = "-" if row.worker is None else str(row.worker)
    return worker, str(row.rank), row.host, *shown, row.state


def _figures(row: Row) -> tuple[float | None, ...]:
    megabytes = None if row.memory_bytes is None else row.memory_bytes / 1e6
    return row.steps, row.steps_per_s, row.samples_per_s, row.wait_share, megabytes
