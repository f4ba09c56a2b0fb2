"""A terminal with a screen of some rows and columns, which knows the sequences that `distopt run --watch` uses."""

import re

_PARTS = re.compile(r"\x1b\[\?7([lh])|\x1b\[(\d+)A|(\x1b\[J)|(\x1b\[2K)|(\r)|(\n)|([^\x1b])")


class Terminal:
    """Attributes: `rows`, all lines so far; the cursor cannot reach those above the screen."""

    def __init__(self, n_rows: int, n_columns: int) -> None:
        self.rows, self.n_rows, self.n_columns = [""], n_rows, n_columns
        self.row, self.column, self.wraps = 0, 0, True

    def feed(self, data: bytes) -> None:
        text, at = data.decode(), 0
        while at < len(text):
            part = _PARTS.match(text, at)
            assert part is not None, f"an unknown sequence: {text[at : at + 10]!r}"
            at = part.end()
            wrap, up, clear, blank, back, down, char = part.groups()
            if wrap:
                self.wraps = wrap == "h"
            elif up:
                self.row = max(self.row - int(up), len(self.rows) - self.n_rows, 0)
            elif clear:
                del self.rows[self.row + 1 :]
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif blank:
                self.rows[self.row] = ""
            elif back:
                self.column = 0
            elif down:
                self._down()
            else:
                self._put(char)

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append("")

    def _put(self, char: str) -> None:
        if self.column == self.n_columns and self.wraps:
            self._down()
        self.column = min(self.column, self.n_columns - 1)
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + char + line[self.column + 1 :]
        self.column += 1

    @property
    def lines(self) -> list[str]:
        """All rows with text."""
        return [row.rstrip() for row in self.rows if row.strip()]
