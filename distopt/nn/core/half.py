"""Half precision: float16 in memory, float32 in the kernels.

After Micikevicius et al., arXiv 1710.03740, sections 3.1 to 3.3. An operation whose first input is float16 computes in
float32, on weights rounded to float16. Its result, and arrays saved for the backward pass, are stored in float16;
vectors, such as biases and the statistics of a normalization, stay float32, and so do losses. Parameters are float32
master weights, so optimizers, communication and files never see float16. `mode.loss_scale` keeps the gradients of
activations, which are float16 too, from underflowing; gradients of parameters do not contain the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..numerics import numerics_of
from .array import Array


def compute(op: Any, arrays: Sequence[Array]) -> Array:
    """The result of `op`, computed in float32, and in float16 unless the operation has its `own_type`."""
    # Rounds float32 arrays to values of float16, except vectors.
    result = op.forward(*[_widened(_stored(array)) for array in arrays])
    if op.own_type:
        return result
    op.saved = _mapped(op.saved, _stored)
    return _narrowed(result)


def gradients(op: Any, dy: Array, into: Sequence[Array | None]) -> list[Array | None]:
    """As `op.gradients`; gradients of float16 inputs are float16."""
    op.saved = _mapped(op.saved, _widened)
    computed = op.gradients(_widened(dy), into)
    pairs = zip(computed, op.inputs, strict=True)
    return [g if g is None or x.dtype != np.float16 else _narrowed(g) for g, x in pairs]


def _narrowed(array: Array) -> Array:
    """A float32 array as float16."""
    return numerics_of(array).to_half(array) if array.dtype == np.float32 else array


def _stored(array: Array) -> Array:
    """A float32 array of two and more dimensions as float16."""
    return _narrowed(array) if array.ndim > 1 else array


def _widened(array: Array) -> Array:
    """A float16 array as float32."""
    return numerics_of(array).from_half(array) if array.dtype == np.float16 else array


def _mapped(value: Any, change: Callable[[Array], Array]) -> Any:
    """`value`, an array or a nest of tuples with arrays, with all arrays changed."""
    if isinstance(value, tuple):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return change(value) if hasattr(value, "dtype") and hasattr(value, "ndim") else value
