"""Numbers that users give: for hyperparameters, and as tensors of one element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...checks import number_or_nan
from ...errors import UsageError
from .tensor import Tensor


def non_negative(what: str, value: Any, below: float = math.inf) -> float:
    """Local. `value` as a float.

    Raises:
        UsageError: it is not a number, negative, or not less than `below`.
    """
    number = number_or_nan(value)
    if not 0 <= number < below:
        limits = "a finite number of at least 0" if below == math.inf else f"a number in [0, {below})"
        raise UsageError(f"{what} {value!r} is not {limits}")
    return number


def number_of(value: Any) -> float:
    """Local. A number, or a tensor or array of one element, as a float.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(value, float):
        return value
    array = value.to_numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise UsageError(f"{value!r} is neither a number nor a tensor of one element; schedules and states need one")
    return float(array.item())
