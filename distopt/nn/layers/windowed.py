"""The base of layers that slide a window over images: sizes, strides and padding as users give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ...checks import check_integer
from ...errors import UsageError
from ..core.tensor import Tensor
from ..numerics.geometry import Padding, Pair, same_padding
from .base import TensorLayer

Size: TypeAlias = "int | Sequence[int]"

_PAD_MODES = ("NOTSET", "SAME_UPPER", "SAME_LOWER")


def pair(what: str, value: Size | None) -> Pair:
    """Height and width from an argument `what` that is one number or two.

    Raises:
        UsageError: it is something else.
    """
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(numbers) != 2:
        raise UsageError(f"{what} is one integer or two; got {value!r}")
    return check_integer(what, numbers[0], 1), check_integer(what, numbers[1], 1)


def _padding(value: Size | None) -> Padding:
    given = value if isinstance(value, (list, tuple)) else (value, value)
    if len(given) not in (2, 4):
        raise UsageError(f"padding is one integer, two, or four (top, bottom, left, right); got {value!r}")
    padding = tuple(check_integer("padding", n, 0) for n in given)
    return padding[::2] if len(padding) == 4 and padding[::2] == padding[1::2] else padding


class Windowed(TensorLayer):
    """A layer that slides a window over images."""

    def __init__(self, kernel_size: Size, stride: Size, padding: Size | None, pad_mode: str) -> None:
        self.kernel_size, self.stride = pair("kernel_size", kernel_size), pair("stride", stride)
        if pad_mode not in _PAD_MODES:
            raise UsageError(f"unknown pad_mode {pad_mode!r}; choose one of {', '.join(_PAD_MODES)}")
        self.padding = _padding(padding) if pad_mode == "NOTSET" else (0, 0)
        self.pad_mode = pad_mode

    def _padding_of(self, x: Tensor) -> Padding:
        if self.pad_mode == "NOTSET":
            return self.padding
        return same_padding(x.array.shape, self.kernel_size, self.stride, self.pad_mode == "SAME_UPPER")
