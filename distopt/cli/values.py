"""Numbers on command lines, as types of argparse."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def at_least(low: int) -> Callable[[str], int]:
    """A parser of whole numbers of at least `low`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= low):
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return read


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:  # NaN fails too
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return value
