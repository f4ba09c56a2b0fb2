"""Layers that pool images [N, C, H, W] or sequences [N, C, 1, L]."""

from __future__ import annotations

from ..core.tensor import Tensor
from ..numerics.geometry import Pair
from ..ops import pooling
from .windowed import Size, Windowed

__all__ = [
    "AvgPool1d",
    "AvgPool2d",
    "MaxPool1d",
    "MaxPool2d",
    "Pooling2d",
]


class Pooling2d(Windowed):
    """The maximum, or the mean, of each window of images [N, C, H, W].

    Args:
        kernel_size: one integer or two, height and width of a window.
        stride: from one window to the next (default: the window's size).
        padding: around the images, as in `Conv2d`; it is never the maximum, and counts as zeros in a mean.
        is_max: whether to take the maximum.
        pad_mode: as in `Conv2d`.
    """

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size | None = 0,
        is_max: bool = True,
        pad_mode: str = "NOTSET",
    ) -> None:
        super().__init__(kernel_size, kernel_size if stride is None else stride, padding, pad_mode)
        self.is_max = is_max

    def forward(self, x: Tensor) -> Tensor:
        """The pooled images [N, C, oh, ow], where oh = (H + top + bottom - kernel height) // stride + 1."""
        operation = pooling.MaxPool2d if self.is_max else pooling.AvgPool2d
        return self._run(operation(self.kernel_size, self.stride, self._padding_of(x)), x)


class MaxPool2d(Pooling2d):
    """The maximum of each window of images [N, C, H, W]; see `Pooling2d`."""

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size | None = 0, pad_mode: str = "NOTSET"
    ) -> None:
        super().__init__(kernel_size, stride, padding, True, pad_mode)


class AvgPool2d(Pooling2d):
    """The mean of each window of images [N, C, H, W], with padding counted as zeros; see `Pooling2d`."""

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size | None = 0, pad_mode: str = "NOTSET"
    ) -> None:
        super().__init__(kernel_size, stride, padding, False, pad_mode)


class MaxPool1d(Pooling2d):
    """The maximum of each window of sequences [N, C, 1, L], `kernel_size` elements long; see `Pooling2d`."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(*_in_a_row(kernel_size, stride, padding), True, pad_mode)


class AvgPool1d(Pooling2d):
    """The mean of each window of sequences [N, C, 1, L], `kernel_size` elements long; see `Pooling2d`."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(*_in_a_row(kernel_size, stride, padding), False, pad_mode)


def _in_a_row(kernel_size: int, stride: int | None, padding: int) -> tuple[Pair, Pair, Pair]:
    return (1, kernel_size), (1, kernel_size if stride is None else stride), (0, padding)
