"""Marks the output of each rank."""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO, cast

__all__ = ["mark_output"]


class _MarkedStream:
    """A text stream that puts a mark at the start of each line; otherwise like the underlying stream."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream = stream
        self._mark = mark
        self._at_line_start = True

    def write(self, text: str) -> int:
        """Write `text` and return its number of characters."""
        marked = []
        for piece in text.splitlines(keepends=True):
            marked.append(self._mark + piece if self._at_line_start else piece)
            self._at_line_start = piece.endswith("\n")
        self._stream.write("".join(marked))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mark_output(rank: int) -> None:
    """Local. Make stdout and stderr of this process write whole lines; those of ranks above 0 get a mark: "[rank 1] ".

    The output of rank 0 is not marked.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write whole lines: a killed rank would lose a larger buffer, and with PYTHONUNBUFFERED the lines of several
        # ranks would mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if rank > 0:
        sys.stdout = cast("TextIO", _MarkedStream(sys.stdout, f"[rank {rank}] "))
        sys.stderr = cast("TextIO", _MarkedStream(sys.stderr, f"[rank {rank}] "))
