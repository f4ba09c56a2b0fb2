"""Half precision: float16 in memory, float32 in the kernels.

After Micikevicius et al., arXiv 1710.03740, sections 3.1 to 3.3. An operation whose first input is float16 computes in
float32, on weights rounded to float16. Its result, and what it saves for the backward pass, are stored in float16;
vectors, such as biases and the statistics of a normalization, stay float32, and so do losses. Parameters are float32
master weights, so optimizers, communication and files know nothing of float16. `mode.loss_scale` keeps the gradients of
activations, which are float16 too, from underflowing; those of parameters come without the factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["compute", "gradients"]

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray


def compute(op: Any, arrays: Sequence[Array]) -> Array:
    """Local. The result of `op`, as float16 unless it is a loss, computed in float32."""
    result = op.forward(*map(_rounded, arrays))
    if op.is_loss:
        return result
    op.saved = _stored(op.saved)
    return result.astype(np.float16)


def gradients(op: Any, dy: Array, into: Sequence[Array | None]) -> list[Array | None]:
    """Local. As `op.gradients`; those of float16 inputs are float16."""
    op.saved = _widened(op.saved)
    computed = op.gradients(_widened(dy), into)
    pairs = zip(computed, op.inputs, strict=True)
    return [g.astype(np.float16) if g is not None and x.dtype == np.float16 else g for g, x in pairs]


def _rounded(array: Array) -> Array:
    """A float32 array of values that float16 has; vectors, integers and wider types as they are."""
    return _widened(_stored(array))


def _stored(value: Any) -> Any:
    """`value`, an array or a nest of tuples with arrays, with float32 arrays of two and more dimensions as float16."""
    return _mapped(value, lambda a: a.astype(np.float16) if a.dtype == np.float32 and a.ndim > 1 else a)


def _widened(value: Any) -> Any:
    """`value` with float16 arrays as float32."""
    return _mapped(value, lambda a: a.astype(np.float32) if a.dtype == np.float16 else a)


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, tuple):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return change(value) if hasattr(value, "dtype") and hasattr(value, "ndim") else value
