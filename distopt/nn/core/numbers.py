"""Numbers that users give as tensors of one element."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import UsageError
from .tensor import Tensor


def number_of(value: Any) -> float:
    """A number, or a tensor or array of one element, as a float.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(value, (int, float)):
        return float(value)
    array = value.to_numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise UsageError(f"{value!r} is neither a number nor a tensor of one element; schedules and states need one")
    return float(array.item())
