"""Raw tensors for scripts of SINGA: arrays with the methods of SINGA's C++ tensors.

`Tensor.data` and the gradients from `Operation.backward` are raw tensors. distopt itself works with `Tensor.array`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..devices.device import Device


class _Shape(tuple[int, ...]):
    """A shape that may also be called, as in SINGA's C++ interface."""

    __slots__ = ()

    def __call__(self) -> tuple[int, ...]:
        return tuple(self)


class RawTensor(np.ndarray[Any, Any]):
    """A NumPy array that also has the methods of SINGA's C++ tensors; it shares memory with its tensor.

    `RawTensor(shape, device=None, dtype=float32)` makes a new one of zeros; on a GPU this is a CuPy array.
    """

    def __new__(cls, shape: Sequence[int], device: Device | None = None, dtype: DTypeLike = np.float32) -> Any:
        return raw((np if device is None else device.xp).zeros(tuple(shape), dtype))

    @property  # type: ignore[misc]
    def shape(self) -> _Shape:
        """The dimensions, as an attribute or by a call."""
        return _Shape(super().shape)

    def GetFloatValue(self, count: int) -> np.ndarray[Any, Any]:  # noqa: N802 - SINGA's name
        """A copy of the first `count` elements, [count]."""
        return np.array(self).reshape(-1)[:count]

    GetIntValue = GetHalfFloatValue = GetFloatValue

    def Size(self) -> int:  # noqa: N802
        """Number of elements."""
        return self.size

    def nDim(self) -> int:  # noqa: N802
        """Number of dimensions."""
        return self.ndim


def raw(array: Any) -> Any:
    """`array` as a `RawTensor` that shares its memory; a CuPy array is returned unchanged."""
    return array.view(RawTensor) if isinstance(array, np.ndarray) else array
