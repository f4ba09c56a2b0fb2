"""The standard streams of an agent; a terminal with a table below all output, redrawn in place.

The table needs three escape sequences, which all terminals have: the cursor goes up, the rest of the screen is cleared,
and long lines are cut or not. The terminal has no other state to be restored, however this process ends.
"""

from __future__ import annotations

import os
import re
import selectors
import time
from collections.abc import Callable, Sequence

from ..sockets import handle_events
from ..stopwatch import Stopwatch
from .output import Output

_CUT, _WRAP = b"\x1b[?7l", b"\x1b[?7h"  # lines that are too long
_MOVES = re.compile(rb"\x1b\[[\d;]*[A-HJSTfsu]|\x1b[78M]")  # of the cursor, as by tqdm's `position`
_STILL_SECONDS = 1.0  # then output that no reader takes is dropped, if it may be
_SUSPENDED_SECONDS = 3.0  # without a new table: the shell has written below the last one


class Screen(Output):
    """The terminal. Its cursor is below the table, and goes up when there is output."""

    shows_prompts = False
    _table: Sequence[str] = ()
    _up = 0  # rows from the cursor to the place of the next output
    _is_unfinished = False  # the last line of the output ends by a carriage return
    _shown_at = 0.0

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of the terminal."""
        columns, rows = os.get_terminal_size(self._fd)
        return columns or 80, rows or 24

    def write(self, data: bytes, writer: object = None) -> None:
        """Write output above the table, which `show` draws again; without moves of the cursor."""
        pieces = _MOVES.sub(b"", data).splitlines(keepends=True)
        if pieces:
            cut = b"".join(_CUT + piece + _WRAP if piece.endswith(b"\r") else piece for piece in pieces)
            self._is_unfinished = not pieces[-1].endswith(b"\n")
            super().write(self._erased() + cut)

    def show(self, table: Sequence[str] | None = None) -> None:
        """Draw a new table, or the last one if output has removed it; not while the terminal takes nothing."""
        if self.unread or (table is None and (self._up or not self._table)):
            return
        if time.monotonic() - self._shown_at > _SUSPENDED_SECONDS:
            self._up = 0
        if table is not None:
            self._table, self._shown_at = table, time.monotonic()
        erased = self._erased()
        rows = [b"\n"] * self._is_unfinished + [f"{row}\n".encode() for row in self._table]
        super().write(erased + _CUT + b"".join(rows) + _WRAP)
        self._up = len(rows)

    def leave(self) -> None:
        """Leave the table where it is, as output."""
        self._table, self._up, self._is_unfinished = (), 0, False

    def _erased(self) -> bytes:
        up, self._up = self._up, 0
        return b"\r\x1b[%dA\x1b[J" % up if up else b""


class Streams:
    """Where the output of ranks is shown: stdout and stderr of this process.

    Args:
        selector: waits for their readers, and for the ranks' output.
        name: begins the lines of this process itself.
        table: whether stderr is a `Screen`, if it is a terminal that can be one.

    Attributes:
        outputs: for stdout, and for stderr. They are one if both are the same `Screen`.
    """

    def __init__(self, selector: selectors.BaseSelector, name: str, *, table: bool) -> None:
        self._selector, self._name = selector, name
        self.outputs: tuple[Output, Output]
        if table and os.isatty(2) and (os.environ.get("TERM") or "dumb") != "dumb":
            screen = Screen(2, selector, self.print)
            is_same = os.isatty(1) and os.fstat(1).st_rdev == os.fstat(2).st_rdev
            self.outputs = (screen if is_same else Output(1, selector, self.print), screen)
        else:
            self.outputs = (Output(1, selector, self.print), Output(2, selector, self.print))

    def print(self, text: str) -> None:
        """Write a line of this process to stderr."""
        self.outputs[1].write(f"{self._name}: {text}\n".encode(errors="backslashreplace"))

    def make_room(self) -> None:
        """From now on, ranks that end need not wait for readers; see `Output.make_room`."""
        for output in self.outputs:
            output.make_room()

    def close(self, may_drop: Callable[[], bool]) -> None:
        """Wait until readers have taken all output, and close.

        Args:
            may_drop: whether the rest is dropped as soon as the readers take nothing for a second.
        """
        outputs = set(self.outputs)
        for output in outputs:
            if output.dropped:
                lines = "line" if output.dropped == 1 else "lines"
                self.print(f"{output.dropped} {lines} of {output.name} could not be written")
        before, clock = 0, Stopwatch()
        while unread := sum(len(output.unread) for output in outputs):
            if unread != before:
                before, clock = unread, Stopwatch()
            elif may_drop() and clock.seconds() > _STILL_SECONDS:
                break
            handle_events(self._selector)
        for output in outputs:
            output.close()
