"""Changes of memory in place, which a backward pass must not overlook.

One clock numbers operations and changes. When a backward pass meets an operation that is older than a change, it
compares the changed memory with the memory that the operation saved for its gradient. Otherwise it compares nothing;
nor does the replay of a captured step. Tensors that share memory, such as a tensor and its reshaped form, share its
changes. A change through an array itself, such as `Tensor.array`, goes unnoticed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...errors import UsageError
from ...kernels import address_of
from .array import Array
from .mode import mode

clock = itertools.count()
# By address and size in bytes, when memory that still exists was last changed, and a reference to its owner.
_changes: dict[tuple[int, int], tuple[int, Any]] = {}
# By optimizer, when it last updated each parameter.
_updates: weakref.WeakKeyDictionary[Any, Mapping[Any, int]] = weakref.WeakKeyDictionary()


def changed(array: Array) -> None:
    """Note that the values of `array` change."""
    place, owner = _place(array), array
    while isinstance(owner.base, (np.ndarray, type(owner))):
        owner = owner.base
    mode.last_change = next(clock)
    _changes[place] = mode.last_change, weakref.ref(owner, lambda _: _changes.pop(place, None))


def updated(optimizer: object, params: Mapping[Any, int]) -> None:
    """Note that `optimizer` has completed a step; `params` maps parameters to the times of their updates."""
    mode.last_change = next(clock)
    _updates[optimizer] = params


def check(op: Any) -> None:
    """Check that the values that `op` saved for its gradient have not changed since.

    Raises:
        UsageError: they have.
    """
    if mode.last_change < op.order:
        return
    places = [place for place, (when, _) in _changes.items() if when > op.order]
    for params in _updates.values():
        places += [_place(param.array) for param, when in params.items() if when > op.order]
    for start, size in map(_place, _arrays([value for name, value in vars(op).items() if name != "inputs"])):
        if any(start < begin + length and begin < start + size for begin, length in places):
            raise UsageError(
                f"values that the gradient of {type(op).__name__} needs were changed in place after it was computed; "
                "change a copy (Tensor.clone), or wait until the backward pass is over"
            )


def _arrays(value: Any) -> Iterator[Array]:
    """The arrays in a nest of tuples and lists."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _arrays(item)
    elif hasattr(value, "nbytes") and hasattr(value, "dtype") and value.nbytes:
        yield value


def _place(array: Array) -> tuple[int, int]:
    """Address and size in bytes of the memory from the first to the last element of an array, gaps included."""
    start = address_of(array)
    if array.flags.c_contiguous:
        return start, array.nbytes
    ends = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return start + sum(end for end in ends if end < 0), array.itemsize + sum(map(abs, ends))
