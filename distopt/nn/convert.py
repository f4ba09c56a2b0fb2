"""Tensors from arrays and raw tensors, and arrays from whatever has values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .device import Device, device_of
from .tensor import Tensor


def from_numpy(array: np.ndarray[Any, Any], device: Device | None = None, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor with a copy of `array`, in `dtype` (default: its own, with 64-bit types made 32-bit, as in SINGA)."""
    return Tensor(data=array, device=device, dtype=dtype)


def from_raw_tensor(raw: Any) -> Tensor:
    """A tensor that shares the memory of a raw tensor: `Tensor.data`, or a gradient of `Operation.backward`."""
    return Tensor.of(raw.view(np.ndarray) if isinstance(raw, np.ndarray) else raw, device_of(raw))


def to_numpy(values: Any) -> np.ndarray[Any, Any]:
    """A copy of a tensor, raw tensor, array or plain number, as a NumPy array; a number gives [1]."""
    if isinstance(values, Tensor):
        return values.to_numpy()
    return np.array(device_of(values).host(values), ndmin=1)
