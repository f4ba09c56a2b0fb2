"""Marks the output of each rank."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

__all__ = ["Relay", "mark_output", "open_standard_streams", "write_all"]

_RELAY_BYTES = 1 << 16
_RELAY_READS = 64


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


def open_standard_streams() -> None:
    """Local. Open those of stdin, stdout and stderr on /dev/null that whoever started this process has closed.

    Otherwise sockets and shared memory would get their numbers, and the ranks' output would be written there.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # noqa: PERF203 - closed; so this opens the number itself, those below it being open
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - as long as the process


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


class Relay:
    """Passes on what a process writes to one of its streams, in whole lines.

    A line that ends by a carriage return, as those of progress bars do, counts as one.

    Args:
        target: descriptor to which the lines are shown.
        mark: what each of these lines begins with.
        copy: file that gets the lines without marks.

    Attributes:
        source: non-blocking descriptor from which the lines are read; closed at the end of the stream.
        sink: the descriptor to write to, for the process.
        error: the last line of the last Python traceback that has passed, which names the exception.
    """

    def __init__(self, target: int, mark: bytes = b"", copy: BinaryIO | None = None) -> None:
        self.source, self.sink = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.source, False)
        self.error = ""
        self._target = target
        self._mark = mark
        self._copy = copy
        self._rest = b""
        self._in_traceback = False

    def pass_on(self) -> bool:
        """Local. Pass on some of what there is; False at the end. Raises BlockingIOError if there is nothing now."""
        part = os.read(self.source, _RELAY_BYTES)
        *lines, self._rest = (self._rest + part).splitlines(keepends=True) or [b""]
        if self._rest.endswith((b"\n", b"\r")) or len(self._rest) > _RELAY_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)
        return bool(part)

    def finish(self) -> None:
        """Local. Pass on what the process has left, an unended line included, and close all; idempotent."""
        if self.source < 0:
            return
        with contextlib.suppress(BlockingIOError):
            for _ in range(_RELAY_READS):  # a process that it has started may write forever
                if not self.pass_on():
                    break
        if self._rest:
            self._write([self._rest + b"\n"])
        os.close(self.source)
        self.source = -1
        if self._copy is not None:
            self._copy.close()

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            if line.startswith(b"Traceback (most recent call last)"):
                self._in_traceback = True
            elif self._in_traceback and not line.startswith((b" ", b"\n")):
                self._in_traceback = False
                self.error = line.decode("utf-8", "replace").strip()
        write_all(self._target, b"".join(self._mark + line for line in lines))
        if self._copy is not None:
            try:
                self._copy.write(b"".join(lines))
            except OSError as error:
                fact = f"distopt run: cannot write {self._copy.name} ({error.strerror}); what follows is shown only\n"
                self._copy.close()
                self._copy = None
                write_all(2, fact.encode())


def write_all(fd: int, data: bytes) -> None:
    """Local. Write all of `data`, also to a descriptor that another process has made non-blocking."""
    while data:
        select.select([], [fd], [])
        with contextlib.suppress(BlockingIOError):
            data = data[os.write(fd, data) :]
