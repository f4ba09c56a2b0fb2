"""What a process is doing: the switches that operations and layers follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Call", "Ran", "mode", "noted"]

T = TypeVar("T")


class Ran(NamedTuple):
    """An `Operation` that ran, on which tensors, and the tensor that came of it."""

    op: Any
    inputs: tuple[Any, ...]
    out: Any


class Call(NamedTuple):
    """A function that changes arrays, and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


class Mode:
    """What a process is doing.

    Attributes:
        training: scripts set it through `autograd.training` or `Model.train` and `Model.eval`.
        ran: where the forward pass of a step is recorded: the operations that have run, and in words what else has
            happened that a replay would not do.
        calls: where a pass is recorded: the calls by which arrays were computed.
    """

    training: bool = False
    ran: list[Ran | str] | None = None
    calls: list[Call] | None = None


mode = Mode()


def noted(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, which goes into the record if there is one."""
    if mode.calls is not None:
        mode.calls.append(Call(function, args))
    return function(*args)
