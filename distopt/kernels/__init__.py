"""Native passes over gradients, for arrays of the host and of a GPU. All functions are local."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import UsageError
from . import host
from .base import FINDINGS, FROM_BAD, Accumulation, Kernels

__all__ = [
    "FINDINGS",
    "FROM_BAD",
    "Accumulation",
    "Kernels",
    "address_of",
    "array_module",
    "check_resolved",
    "check_unmasked",
    "kernels_of",
]


def kernels_of(array: Any) -> Kernels:
    """The kernels for arrays like this one. Ask once and keep the answer."""
    if isinstance(array, np.ndarray):
        return host
    from . import gpu  # needs CuPy

    return gpu


def check_unmasked(array: object) -> None:
    """Raises a UsageError for a masked array, whose mask would be ignored."""
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(
            "a masked array would lose its mask; pass array.filled(0), say, and numpy.ma.getmaskarray(array) if needed"
        )


def check_resolved(array: object) -> None:
    """Raises a UsageError for a tensor of PyTorch that is negated as it is read, which DLPack omits."""
    if getattr(array, "is_neg", bool)():
        raise UsageError(
            f"a {type(array).__name__} with PyTorch's negative bit would lose its sign; pass its resolve_neg()"
        )


def address_of(array: Any) -> int:
    """Where the memory of an array of NumPy or CuPy begins."""
    return int(array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr)


def array_module(array: object) -> Any:
    """Numpy or cupy, whichever `array` is of."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]
