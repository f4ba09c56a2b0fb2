"""A terminal with a table below all output, redrawn in place.

It needs three escape sequences, which all terminals have: the cursor goes up, the rest of the screen is cleared, and
long lines are cut or not. The terminal has no other state to be restored, however this process ends.
"""

from __future__ import annotations

import os
import re
import selectors
import time
from collections.abc import Callable, Sequence

from .output import Output

_CUT, _WRAP = b"\x1b[?7l", b"\x1b[?7h"  # lines that are too long
_MOVES = re.compile(rb"\x1b\[[\d;]*[A-HJSTfsu]|\x1b[78M]")  # of the cursor, as by tqdm's `position`
_SUSPENDED_SECONDS = 3.0  # without a new table: the shell has written below the last one


def outputs(selector: selectors.BaseSelector, warn: Callable[[str], None], *, table: bool) -> tuple[Output, Output]:
    """Local. Where stdout and stderr go; with `table`, stderr is a `Screen` if it is a terminal that can be one."""
    if not (table and os.isatty(2) and (os.environ.get("TERM") or "dumb") != "dumb"):
        return Output(1, selector, warn), Output(2, selector, warn)
    screen = Screen(2, selector, warn)
    same = os.isatty(1) and os.fstat(1).st_rdev == os.fstat(2).st_rdev
    return screen if same else Output(1, selector, warn), screen


class Screen(Output):
    """The terminal. Its cursor is below the table, and goes up when there is output."""

    _table: Sequence[str] = ()
    _up = 0  # rows from the cursor to the place of the next output
    _is_unfinished = False  # the last line of the output ends by a carriage return
    _shown_at = 0.0

    @property
    def size(self) -> tuple[int, int]:
        """Local. Columns and rows."""
        columns, rows = os.get_terminal_size(self._fd)
        return columns or 80, rows or 24

    def write(self, data: bytes) -> None:
        """Local. Write output above the table, which `show` draws again; without moves of the cursor."""
        pieces = _MOVES.sub(b"", data).splitlines(keepends=True)
        if pieces:
            cut = b"".join(_CUT + piece + _WRAP if piece.endswith(b"\r") else piece for piece in pieces)
            self._is_unfinished = not pieces[-1].endswith(b"\n")
            super().write(self._erased() + cut)

    def show(self, table: Sequence[str] | None = None) -> None:
        """Local. Draw a new table, or the last one if output has removed it; not while the terminal takes nothing."""
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
        """Local. Leave the table where it is, as output."""
        self._table, self._up, self._is_unfinished = (), 0, False

    def _erased(self) -> bytes:
        up, self._up = self._up, 0
        return b"\r\x1b[%dA\x1b[J" % up if up else b""
