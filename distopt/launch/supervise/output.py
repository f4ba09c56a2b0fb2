"""Marks the output of each rank, and shows it without waiting for its reader."""

from __future__ import annotations

import contextlib
import io
import os
import select
import selectors
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TextIO, cast

from ..sockets import handle_events

_RELAY_BYTES = 1 << 16
_RELAY_READS = 64
_ROOM_BYTES = 16 << 20


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
    """Open each of stdin, stdout and stderr on /dev/null if the parent of this process has closed it.

    Otherwise sockets and shared memory would get the numbers 0 to 2, and the ranks' output would be written there.
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
    """Make stdout and stderr of this process write whole lines, on ranks above 0 with a mark: "[rank 1] ".

    The output of rank 0 is not marked.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write whole lines: a killed rank would lose a larger buffer, and with PYTHONUNBUFFERED the lines of several
        # ranks would mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if rank > 0:
        sys.stdout = cast("TextIO", _MarkedStream(sys.stdout, f"[rank {rank}] "))
        sys.stderr = cast("TextIO", _MarkedStream(sys.stderr, f"[rank {rank}] "))


class Output:
    """A stream of this process, written without waiting for its reader.

    While the reader takes nothing, `sources` are read only up to `room`. Lines that cannot be written, as on a
    full disk, are dropped and counted.

    Args:
        fd: descriptor of the stream.
        selector: waits for the reader and for the sources.
        warn: gets a line about the first that are dropped.

    Attributes:
        shows_prompts: whether the beginning of a line may be shown before the rest.
        sources: waits for descriptors whose contents are to be shown, each registered with a function to call.
        unread: output that waits for the reader.
        room: `sources` are read while no more bytes than these are waiting.
        dropped: number of lines that could not be written.
        warn: the argument.
    """

    shows_prompts: ClassVar[bool] = True

    def __init__(self, fd: int, selector: selectors.BaseSelector, warn: Callable[[str], None]) -> None:
        self._unfinished: object = None  # the writer of a line that has no end yet
        self.sources = selectors.EpollSelector()
        self.unread = bytearray()
        self.room = 0
        self.dropped = 0
        self.warn = warn
        self.name = {1: "stdout", 2: "stderr"}.get(fd, f"descriptor {fd}")
        self._selector = selector
        self._files = contextlib.ExitStack()
        self._files.callback(self.sources.close)
        self._fd = fd
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):  # reopened, because other processes may rely on its blocking
            with contextlib.suppress(OSError):  # it is another user's; its reader has ended
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                self._files.callback(os.close, self._fd)
        self._arrange()

    def make_room(self) -> None:
        """From now on, the ranks may write so much that they can save their states without a reader."""
        self.room = _ROOM_BYTES
        self._arrange()

    def write(self, data: bytes, writer: object = None) -> None:
        """Write as much as the reader takes now, and the rest later.

        Args:
            data: whole lines; only a `writer` may leave a line unfinished, which others then end.
            writer: who writes.
        """
        if data and self._unfinished not in (None, writer):
            data = b"\n" + data
        if data:
            self._unfinished = None if data.endswith((b"\n", b"\r")) else writer
        stood_still = bool(self.unread)
        self.unread += data
        if stood_still:
            self._arrange()
        else:
            self._flush()

    def close(self) -> None:
        """Drop all output that the reader has not taken."""
        self._wait_for(self._fd, False)
        self._wait_for(self.sources, False)
        self._files.close()

    def _arrange(self) -> None:
        """Wait for the reader if output is unread, and for the sources if there is room."""
        self._wait_for(self._fd, bool(self.unread))
        self._wait_for(self.sources, len(self.unread) <= self.room)

    def _wait_for(self, file: int | selectors.EpollSelector, wanted: bool) -> None:
        if wanted == (file in self._selector.get_map()):
            return
        if not wanted:
            self._selector.unregister(file)
        elif file is self.sources:
            self._selector.register(file, selectors.EVENT_READ, partial(handle_events, self.sources, 0.0))
        else:
            self._selector.register(file, selectors.EVENT_WRITE, self._flush)

    def _flush(self) -> None:
        try:
            while self.unread and select.select([], [self._fd], [], 0.0)[1]:
                del self.unread[: os.write(self._fd, self.unread[: select.PIPE_BUF])]
        except BlockingIOError:
            pass
        except OSError as error:
            dropped_before = self.dropped
            self.dropped += len(self.unread.splitlines())
            self.unread.clear()
            if not dropped_before:  # one warning, itself dropped if this is stderr
                self.warn(f"cannot write {self.name} ({error.strerror}); lines are dropped until it can be written")
        self._arrange()


class Relay:
    """Passes on the output of a process on one of its streams, in whole lines.

    A line may also end by a carriage return, as in progress bars.

    Args:
        target: where the lines are shown, as they come and as its reader takes them.
        mark: the prefix of each of these lines.
        copy: file that gets the lines without marks.
        prompts: whether the beginning of a line is shown at once, as a debugger's; for a process without a mark.
        shows: whether the lines are shown.
        takes: gets each line, and says whether that is all that happens to it.

    Attributes:
        source: non-blocking descriptor to read the lines from; closed at the end of the stream.
        sink: the descriptor to write to, for the process.
        error: the last line of the last Python traceback that has passed, which names the exception.
    """

    def __init__(
        self,
        target: Output,
        mark: bytes = b"",
        copy: BinaryIO | None = None,
        *,
        prompts: bool = False,
        shows: bool = True,
        takes: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        self.source, self.sink = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.source, False)
        self.error = ""
        self._target = target
        self._mark = mark
        self._copy = copy
        self._rest = b""
        self._prompts = prompts
        self._shows, self._takes = shows, takes
        self._n_shown = 0  # bytes of the rest that have been shown
        self._in_traceback = False
        target.sources.register(self.source, selectors.EVENT_READ, self._on_readable)

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been read
            if not self.pass_on():
                self.finish()

    def pass_on(self) -> bool:
        """Pass on some of the output; False at the end. Raises BlockingIOError if there is nothing now."""
        part = os.read(self.source, _RELAY_BYTES)
        *lines, self._rest = (self._rest + part).splitlines(keepends=True) or [b""]
        if self._rest.endswith((b"\n", b"\r")) or len(self._rest) > _RELAY_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)
        return bool(part)

    def finish(self) -> None:
        """Pass on the rest of the output, with an unfinished line, and close all; idempotent."""
        if self.source < 0:
            return
        self._target.sources.unregister(self.source)
        with contextlib.suppress(BlockingIOError):  # no more now
            for _ in range(_RELAY_READS):  # a process that it has started may write forever
                if not self.pass_on():
                    break
        if rest := self._rest:
            self._rest = b""
            self._write([rest + b"\n"])
        os.close(self.source)
        self.source = -1
        if self._copy is not None:
            self._copy.close()

    def _write(self, lines: list[bytes]) -> None:
        lines = [line for line in lines if not self._takes(line)]
        for line in lines:
            if line.startswith(b"Traceback (most recent call last)"):
                self._in_traceback = True
            elif self._in_traceback and not line.startswith((b" ", b"\n")):
                self._in_traceback = False
                self.error = line.decode("utf-8", "replace").strip()
        begun = self._rest if self._prompts else b""
        if self._shows:
            self._target.write((b"".join(self._mark + line for line in lines) + begun)[self._n_shown :], self)
        self._n_shown = len(begun)
        if self._copy is not None:
            try:
                self._copy.write(b"".join(lines))
            except OSError as error:
                self._target.warn(f"cannot write {self._copy.name} ({error.strerror}); what follows is shown only")
                self._copy.close()
                self._copy = None
