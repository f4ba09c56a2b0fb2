"""Functions and classes that `torch.compile` leaves as they are."""

from __future__ import annotations

import contextlib
from types import FunctionType
from typing import TypeVar

_Kind = TypeVar("_Kind", bound=type)


def untraced(kind: _Kind) -> _Kind:
    """Local. Have compiled code call the methods of class `kind` as those of a group of C++, without tracing them.

    `torch.compiler.disable` does that, too, but wraps every method, which costs 2.5 microseconds a call.
    """
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            method._torchdynamo_disable = True  # type: ignore[attr-defined] # not traced by a caller,
            with contextlib.suppress(ImportError):  # nor when called outside a graph
                from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

                strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
                set_code_exec_strategy(method.__code__, strategy)
    return kind
