"""Elementwise operations on several arrays, besides the arithmetic of `core.tensor`. All broadcast as NumPy."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

from ...kernels import array_module
from ..core.arithmetic import Broadcast, broadcast
from ..core.array import Array, float32

# a to the power b, float32 for integers. The gradient of b is 0 where a is 0.
Pow = broadcast(
    "Pow",
    lambda a, b: (a if a.dtype.kind == "f" else a.astype(float32)) ** b,
    lambda dy, a, b: dy * b * a ** array_module(dy).where(b == 0, 1, b - 1),
    lambda dy, a, b: dy * a**b * array_module(dy).log(array_module(dy).where(a == 0, 1, a)),
)
# x where it is at least 0, else slope * x (He et al., arXiv 1502.01852).
PRelu = broadcast(
    "PRelu",
    lambda x, slope: array_module(x).where(x < 0, slope * x, x),
    lambda dy, x, slope: dy * array_module(dy).where(x < 0, slope, 1),
    lambda dy, x, slope: dy * array_module(dy).where(x < 0, x, 0),
)


class Where(Broadcast):
    """a where the condition holds, else b.

    Args:
        condition: an array of Booleans, which is broadcast with a and b.
    """

    def __init__(self, condition: Array) -> None:
        self.condition = condition

    def value(self, a: Array, b: Array) -> Array:
        return array_module(a).where(self.condition, a, b)

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        where = array_module(dy).where
        da = self.reduced(where(self.condition, dy, 0), 0) if self.needs[0] else None
        return da, self.reduced(where(self.condition, 0, dy), 1) if self.needs[1] else None


class Sum(Broadcast):
    """The sum of arrays, element by element."""

    def value(self, *xs: Array) -> Array:
        return reduce(operator.add, xs) if len(xs) > 1 else xs[0].copy()

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        return [self.reduced(dy.copy(), i) if need else None for i, need in enumerate(self.needs)]


class Mean(Sum):
    """The mean of arrays, element by element."""

    def value(self, *xs: Array) -> Array:
        return super().value(*xs) / len(xs)

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        dy /= len(self.needs)
        return super().gradients(dy, into)


class Max(Broadcast):
    """The greatest of arrays, element by element. The first of several that are equal has the gradient."""

    choice = "maximum"

    def value(self, *xs: Array) -> Array:
        return reduce(getattr(array_module(xs[0]), self.choice), xs) if len(xs) > 1 else xs[0].copy()

    def forward(self, *xs: Array) -> Array:
        y = super().forward(*xs)
        self.saved = xs, y
        return y

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        xs, y = self.saved
        where = array_module(dy).where
        gradients = []
        for i, x in enumerate(xs):
            chosen = x == y
            gradients.append(self.reduced(where(chosen, dy, 0), i))
            dy = where(chosen, 0, dy)
        return gradients


class Min(Max):
    """The least of arrays, element by element; see `Max`."""

    choice = "minimum"


class Truth(Broadcast):
    """1.0 where a predicate of NumPy's holds, else 0.0. It has no gradient.

    Args:
        predicate: its name, such as "greater" or "logical_not".
    """

    def __init__(self, predicate: str) -> None:
        self.predicate = predicate

    def value(self, *xs: Array) -> Array:
        return getattr(array_module(xs[0]), self.predicate)(*xs).astype(float32)

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        return [None] * len(self.needs)
