"""Probes, their findings, and how these are displayed."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TextIO, TypeAlias

State: TypeAlias = Literal["ok", "failed", "absent"]


@dataclass(frozen=True)
class Finding:
    """The result of a probe.

    Attributes:
        state: "ok", "failed", or "absent" for an optional part that is not installed.
        found: the facts, in one line.
        cure: how to fix it; with "ok", advice.
    """

    state: State
    found: str
    cure: str = ""


def ok(found: str, cure: str = "") -> Finding:
    """The finding for a part that works."""
    return Finding("ok", found, cure)


def failed(found: str, cure: str) -> Finding:
    """The finding for a part that does not work, or that is required and missing."""
    return Finding("failed", found, cure)


def absent(found: str, cure: str = "") -> Finding:
    """The finding for an optional part that is not installed."""
    return Finding("absent", found, cure)


@dataclass(frozen=True)
class Probe:
    """A check; `needed` if training on the CPUs of one machine depends on it."""

    name: str
    run: Callable[[], Finding]
    needed: bool = False


def examine(probe: Probe) -> Finding:
    """Run one probe; an exception becomes a failed finding."""
    try:
        return probe.run()
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return failed(f"the probe failed: {what}", "repair what it names, or report it as a fault of distopt")


@dataclass(frozen=True)
class Style:
    """How rows are displayed on an output."""

    marks: dict[str, str]
    arrow: str
    encoding: str
    width: int

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Symbols that the encoding of `stream` supports, and the width of the terminal."""
        encoding = stream.encoding or "ascii"
        width = shutil.get_terminal_size((120, 24)).columns
        marks, arrow = {"ok": "\u2713", "failed": "\u2717", "absent": "\u2013"}, "\u2192"
        try:
            "".join([*marks.values(), arrow]).encode(encoding)
        except (UnicodeEncodeError, LookupError):
            marks, arrow = {"ok": "ok", "failed": "FAIL", "absent": "-"}, "->"
        return cls(marks, arrow, encoding, max(60, width))

    def row(self, name: str, finding: Finding) -> str:
        """One row; long text wraps within its column."""
        margin = max(map(len, self.marks.values())) + 1
        head = f"{self.marks[finding.state]:<{margin}}{name:<15}"
        lines = [self._wrap(finding.found, head, " " * len(head))]
        if finding.cure:
            lines.append(self._wrap(finding.cure, " " * len(head) + self.arrow + " ", " " * (len(head) + 2)))
        # A path or a library's message may contain characters that the output cannot encode.
        return "\n".join(lines).encode(self.encoding, "replace").decode(self.encoding)

    def _wrap(self, text: str, first: str, rest: str) -> str:
        return textwrap.fill(
            " ".join(text.split()),
            self.width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
