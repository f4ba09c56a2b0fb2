"""`distopt run --workers --watch`: the ranks of all workers, and which of these are members, join, or are lost.

The process that supervises a worker reports its ranks as lines of `--watch=json`. The supervisor of the node reads
them, and sends them where the service is, which shows all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..agents.monitor import Display, Row, listed, silence
from .membership import Worker


class WorkersMonitor:
    """Shows all rows.

    Args:
        display: shows them.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._rows: dict[tuple[str, int], dict[int, Row]] = {}  # by the node and place of a worker, and by rank

    def take(self, node: str, place: int, row: Row) -> None:
        """A row of the worker at this place among those of a node."""
        rows = self._rows.setdefault((node, place), {})
        before = rows.get(row.rank)
        row.at = time.monotonic()
        row.worker = before.worker if before is not None and before.pid == row.pid else None
        rows[row.rank] = row

    def forget(self, node: str) -> None:
        """Drop the rows of a node that is lost."""
        self._rows = {key: rows for key, rows in self._rows.items() if key[0] != node}

    def report(
        self, workers: Mapping[tuple[str, int], Worker], summary: Mapping[str, Any], *, at_the_end: bool
    ) -> None:
        """Once a second, show the rows.

        Args:
            workers: by host and pid of their first ranks.
            summary: that of `Membership`.
            at_the_end: the job has ended: show them now, and let the table stand.
        """
        if not self._display.is_due(at_the_end=at_the_end):
            return
        now, shown = time.monotonic(), []
        for rows in self._rows.values():
            first = rows.get(0)
            worker = None if first is None else workers.get((first.host, first.pid))
            for row in rows.values():
                if worker is not None:
                    row.worker = worker.number
                said = _state_of(worker) if worker is not None and row.memory_bytes is not None else ""
                shown.append(replace(row, state=silence(row, now) or said or row.state))
        shown.sort(key=lambda row: (row.worker is None, row.worker or 0, row.host, row.rank))
        self._display.show(shown, at_the_end=at_the_end, summary={**summary, "text": _text_of(summary)})


def _state_of(worker: Worker) -> str:
    """The state of the ranks of a worker that takes no part; else nothing."""
    if worker.is_away:
        return "no sign of life"
    if worker.phase == "done":
        return "has the last average"
    if worker.phase == "member":
        return ""
    return "left out, joins again" if worker.is_late else "joins"


def _text_of(summary: Mapping[str, Any]) -> str:
    average = summary["average"]
    parts = ["no average yet" if average is None else f"average {average}"]
    parts += [f"{name}: {listed(summary[name])}" for name in ("members", "lost") if summary[name]]
    return "; ".join(parts)
