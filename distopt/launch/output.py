"""What a rank writes, told apart from what the others write."""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO, cast

__all__ = ["mark_output"]


class _MarkedStream:
    """A text stream whose lines begin with a mark. All else is that of the stream below."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream = stream
        self._mark = mark
        self._at_line_start = True

    def write(self, text: str) -> int:
        """Write `text`; the number of its characters."""
        marked = []
        for piece in text.splitlines(keepends=True):
            marked.append(self._mark + piece if self._at_line_start else piece)
            self._at_line_start = piece.endswith("\n")
        self._stream.write("".join(marked))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mark_output(rank: int) -> None:
    """Local. Let stdout and stderr of this process write whole lines; those of a rank above 0 begin with "[rank 1] ".

    Rank 0 speaks for the job, and what it prints stays as it is.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Whole lines at once: a killed rank would take a full buffer with it, and with PYTHONUNBUFFERED the lines of
        # several ranks would mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if rank > 0:
        sys.stdout = cast("TextIO", _MarkedStream(sys.stdout, f"[rank {rank}] "))
        sys.stderr = cast("TextIO", _MarkedStream(sys.stderr, f"[rank {rank}] "))
