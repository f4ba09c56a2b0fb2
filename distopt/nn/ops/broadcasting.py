"""Operations on the elements of several tensors, which broadcast as in NumPy; comparisons and logic."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...kernels import array_module
from ..core.arithmetic import Add, Broadcast, Div, Mul, Sub, broadcast
from ..core.array import Array, float32
from ..core.operation import Arrays, Operation, named
from ..core.tensor import Tensor

__all__ = [
    "add",
    "add_all",
    "div",
    "equal",
    "greater",
    "less",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "max",
    "mean",
    "min",
    "mul",
    "pow",
    "prelu",
    "sub",
    "sum",
    "where",
]


def _of_two(name: str, text: str, operation: Callable[[], Operation]) -> Callable[..., Tensor]:
    """The function `name`, with the docstring `text`: an operation on a tensor and a tensor, array or number."""

    def function(a: Any, b: Any) -> Tensor:
        tensor = a if isinstance(a, Tensor) else b
        if isinstance(tensor, Tensor):
            a, b = tensor.operand(a), tensor.operand(b)
        result: Tensor = operation()(a, b)
        return result

    return named(function, name, text)


def _of_several(name: str, text: str, operation: Callable[[], Operation]) -> Callable[..., Tensor]:
    """The function `name`, with the docstring `text`: an operation on one or more tensors."""

    def function(*xs: Tensor) -> Tensor:
        return operation()(*xs)

    return named(function, name, text)


add = _of_two("add", "`a + b`, with broadcasting.", Add)
sub = _of_two("sub", "`a - b`, with broadcasting.", Sub)
mul = _of_two("mul", "`a * b`, with broadcasting.", Mul)
div = _of_two("div", "`a / b`, with broadcasting.", Div)

# a to the power b, float32 for integers. The gradient of b is 0 where a is 0.
Pow = broadcast(
    "Pow",
    lambda a, b: (a if a.dtype.kind == "f" else a.astype(float32)) ** b,
    lambda dy, a, b: dy * b * a ** array_module(dy).where(b == 0, 1, b - 1),
    lambda dy, a, b: dy * a**b * array_module(dy).log(array_module(dy).where(a == 0, 1, a)),
)
pow = _of_two("pow", "`a` to the power `b`, with broadcasting. The gradient of `b` is 0 where `a` is 0.", Pow)

# x where it is at least 0, else slope * x (He et al., arXiv 1502.01852).
PRelu = broadcast(
    "PRelu",
    lambda x, slope: array_module(x).where(x < 0, slope * x, x),
    lambda dy, x, slope: dy * array_module(dy).where(x < 0, slope, 1),
    lambda dy, x, slope: dy * array_module(dy).where(x < 0, x, 0),
)


def prelu(x: Tensor, slope: Tensor | float) -> Tensor:
    """The value x where it is at least 0, else `slope` x, with broadcasting (He et al., arXiv 1502.01852)."""
    return PRelu()(x, x.operand(slope))


class Where(Broadcast):
    """a where the condition holds, else b.

    Args:
        condition: an array of Booleans, which is broadcast with a and b.
    """

    def __init__(self, condition: Array) -> None:
        self.condition = condition

    def value(self, a: Array, b: Array) -> Array:
        return array_module(a).where(self.condition, a, b)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        where = array_module(dy).where
        da = self.reduced(where(self.condition, dy, 0), 0) if self.needs[0] else None
        return da, self.reduced(where(self.condition, 0, dy), 1) if self.needs[1] else None


def where(x: Tensor, y: Tensor | float, condition: Tensor | ArrayLike) -> Tensor:
    """`x` where the condition holds (is not 0), else `y`, with broadcasting."""
    given = condition.array if isinstance(condition, Tensor) else np.asarray(condition)
    return Where(x.device.xp.asarray(given != 0))(x, x.operand(y))


class Sum(Broadcast):
    """The sum of arrays, element by element."""

    def value(self, *xs: Array) -> Array:
        return reduce(operator.add, xs) if len(xs) > 1 else xs[0].copy()

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return [self.reduced(dy.copy(), i) if need else None for i, need in enumerate(self.needs)]


sum = _of_several(
    "sum", "The sum of tensors, element by element, with broadcasting; `reduce_sum` adds the elements of one.", Sum
)
add_all = _of_several("add_all", "The sum of tensors, with broadcasting; as `sum`.", Sum)


class Mean(Sum):
    """The mean of arrays, element by element."""

    def value(self, *xs: Array) -> Array:
        return super().value(*xs) / len(xs)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dy /= len(self.needs)
        return super().gradients(dy, into)


mean = _of_several("mean", "The mean of tensors, element by element, with broadcasting.", Mean)


class Max(Broadcast):
    """The greatest of arrays, element by element. The first of several that are equal has the gradient."""

    choice = "maximum"

    def value(self, *xs: Array) -> Array:
        return reduce(getattr(array_module(xs[0]), self.choice), xs) if len(xs) > 1 else xs[0].copy()

    def forward(self, *xs: Array) -> Array:
        y = super().forward(*xs)
        self.saved = xs, y
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        xs, y = self.saved
        where = array_module(dy).where
        gradients = []
        for i, x in enumerate(xs):
            chosen = (x == y) | (x != x)  # noqa: PLR0124 - a NaN is the result
            gradients.append(self.reduced(where(chosen, dy, 0), i))
            dy = where(chosen, 0, dy)
        return gradients


class Min(Max):
    """The least of arrays, element by element; see `Max`."""

    choice = "minimum"


_CHOICE = "of tensors, element by element, with broadcasting. The first of equal ones has the gradient."
max = _of_several("max", f"The greatest {_CHOICE}", Max)
min = _of_several("min", f"The least {_CHOICE}", Min)


# -- comparisons and logic: 1.0 for true, 0.0 for false, without a gradient -------------------------------------------
class Truth(Broadcast):
    """1.0 where a predicate of NumPy's holds, else 0.0. It has no gradient.

    Args:
        predicate: its name, such as "greater" or "logical_not".
    """

    def __init__(self, predicate: str) -> None:
        self.predicate = predicate

    def value(self, *xs: Array) -> Array:
        return getattr(array_module(xs[0]), self.predicate)(*xs).astype(float32)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return [None] * len(self.needs)


greater = _of_two("greater", "1.0 where `a > b`, else 0.0.", partial(Truth, "greater"))
less = _of_two("less", "1.0 where `a < b`, else 0.0.", partial(Truth, "less"))
equal = _of_two("equal", "1.0 where `a == b`, else 0.0.", partial(Truth, "equal"))
logical_and = _of_two("logical_and", "1.0 where both are not 0, else 0.0.", partial(Truth, "logical_and"))
logical_or = _of_two("logical_or", "1.0 where one is not 0, else 0.0.", partial(Truth, "logical_or"))
logical_xor = _of_two("logical_xor", "1.0 where exactly one is not 0, else 0.0.", partial(Truth, "logical_xor"))


def logical_not(x: Tensor) -> Tensor:
    """1.0 where `x` is 0, else 0.0."""
    return Truth("logical_not")(x)
