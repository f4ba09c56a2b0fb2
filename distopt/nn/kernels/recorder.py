"""Recording of the calls that compute arrays, which the replay of a step repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Call(NamedTuple):
    """A function that modifies arrays, and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


class Recorder:
    """The recording of this process.

    Attributes:
        calls: the calls so far; None while nothing is recorded.
    """

    calls: list[Call] | None = None


recorder = Recorder()


def noted(function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, and record the call if recording is on."""
    if recorder.calls is not None:
        recorder.calls.append(Call(function, args))
    return function(*args)
