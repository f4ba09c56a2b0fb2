"""Operations on each element of one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ...errors import UsageError
from ...kernels import array_module
from ..core.array import Array, element_type, settled
from ..core.mode import mode
from ..core.operation import Arrays, Operation, named
from ..core.tensor import Tensor
from ..numerics import numerics_of

Formula: TypeAlias = Callable[..., Array]  # value(array module, x, *options) and slope(array module, x, y, *options)

__all__ = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cast",
    "ceil",
    "clip",
    "cos",
    "cosh",
    "dropout",
    "elu",
    "erf",
    "exp",
    "floor",
    "hardsigmoid",
    "identity",
    "leakyrelu",
    "log",
    "negative",
    "reciprocal",
    "relu",
    "round",
    "rounde",
    "selu",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "softplus",
    "softsign",
    "sqrt",
    "tan",
    "tanh",
]


class ElementWise(Operation):
    """y[i] = value(x[i]). For integers x, values that are not integers are float32."""

    value: ClassVar[Formula]
    slope: ClassVar[Formula]

    def __init__(self, *options: float | None) -> None:
        self.options = options

    def forward(self, x: Array) -> Array:
        y = settled(self.value(array_module(x), x, *self.options), x)
        self.saved = x, y
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dy *= self.slope(array_module(dy), *self.saved, *self.options)
        return (dy,)


def _operation(name: str, value: Formula, slope: Formula) -> type[ElementWise]:
    return type(name, (ElementWise,), {"value": staticmethod(value), "slope": staticmethod(slope)})


def _function(name: str, text: str, value: str | Formula, slope: Formula) -> Callable[[Tensor], Tensor]:
    """An operation as a function; `value` may be the name of a function that NumPy and CuPy have."""
    formula = (lambda xp, x: getattr(xp, value)(x)) if isinstance(value, str) else value
    operation = _operation(name.capitalize(), formula, slope)

    def function(x: Tensor) -> Tensor:
        return operation()(x)

    return named(function, name, text)


def _erf(xp: Any, x: Array) -> Array:
    if xp is np:  # NumPy has no erf; this takes about 0.1 microseconds for each element
        return np.vectorize(math.erf, otypes="d")(x).astype(x.dtype if x.dtype.kind == "f" else np.float32)
    from cupyx.scipy.special import erf

    return erf(x)


def _round(xp: Any, x: Array) -> Array:
    whole = xp.trunc(x)
    return xp.where(xp.abs(x - whole) >= 0.5, whole + xp.sign(x), whole)  # floor(x + 0.5) errs below 0.5


# -- a formula, and its derivative in terms of x and the result y -----------------------------------------------------
abs = _function("abs", "|x|.", "abs", lambda xp, x, y: xp.sign(x))
acos = _function("acos", "The arc cosine.", "arccos", lambda xp, x, y: -1 / xp.sqrt((1 - x) * (1 + x)))
acosh = _function(
    "acosh", "The inverse of cosh, at least 0.", "arccosh", lambda xp, x, y: 1 / xp.sqrt((x - 1) * (x + 1))
)
asin = _function("asin", "The arc sine.", "arcsin", lambda xp, x, y: 1 / xp.sqrt((1 - x) * (1 + x)))
asinh = _function("asinh", "The inverse of sinh.", "arcsinh", lambda xp, x, y: 1 / xp.sqrt(x * x + 1))
atan = _function("atan", "The arc tangent.", "arctan", lambda xp, x, y: 1 / (1 + x * x))
atanh = _function("atanh", "The inverse of tanh.", "arctanh", lambda xp, x, y: 1 / ((1 - x) * (1 + x)))
ceil = _function("ceil", "The next integer, upwards.", "ceil", lambda xp, x, y: 0)
cos = _function("cos", "The cosine.", "cos", lambda xp, x, y: -xp.sin(x))
cosh = _function("cosh", "The hyperbolic cosine.", "cosh", lambda xp, x, y: xp.sinh(x))
erf = _function("erf", "The error function.", _erf, lambda xp, x, y: 2 / math.sqrt(math.pi) * xp.exp(-(x * x)))
exp = _function("exp", "e to the power x.", "exp", lambda xp, x, y: y)
floor = _function("floor", "The next integer, downwards.", "floor", lambda xp, x, y: 0)
identity = _function("identity", "A copy of x.", lambda xp, x: x.copy(), lambda xp, x, y: 1)
log = _function("log", "The natural logarithm.", "log", lambda xp, x, y: 1 / x)
negative = _function("negative", "-x.", lambda xp, x: -x, lambda xp, x, y: -1)
reciprocal = _function("reciprocal", "1 / x.", lambda xp, x: 1 / x, lambda xp, x, y: -y * y)
round = _function("round", "The nearest integer; halves go away from zero.", _round, lambda xp, x, y: 0)
rounde = _function("rounde", "The nearest integer; halves go to the even one.", "rint", lambda xp, x, y: 0)
sign = _function("sign", "-1, 0 or 1.", "sign", lambda xp, x, y: 0)
sin = _function("sin", "The sine.", "sin", lambda xp, x, y: xp.cos(x))
sinh = _function("sinh", "The hyperbolic sine.", "sinh", lambda xp, x, y: xp.cosh(x))
softplus = _function(
    "softplus", "log(1 + exp(x)).", lambda xp, x: xp.logaddexp(x, xp.zeros_like(x)), lambda xp, x, y: -xp.expm1(-y)
)
softsign = _function(
    "softsign", "x / (1 + |x|).", lambda xp, x: x / (1 + xp.abs(x)), lambda xp, x, y: 1 / xp.square(1 + xp.abs(x))
)
sqrt = _function("sqrt", "The square root.", "sqrt", lambda xp, x, y: 0.5 / y)
tan = _function("tan", "The tangent.", "tan", lambda xp, x, y: 1 + y * y)
tanh = _function("tanh", "The hyperbolic tangent.", "tanh", lambda xp, x, y: 1 - y * y)

# -- with options -----------------------------------------------------------------------------------------------------
_Clip = _operation(
    "Clip",
    lambda xp, x, low, high: xp.minimum(xp.maximum(x, low), high),
    lambda xp, x, y, low, high: (x >= low) & (x <= high),
)


def clip(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """The value x, but no less than `min` and no more than `max`; None sets no bound."""
    return _Clip(-math.inf if min is None else min, math.inf if max is None else max)(x)


_Elu = _operation(
    "Elu",
    lambda xp, x, alpha: xp.where(x >= 0, x, alpha * xp.expm1(xp.minimum(x, 0))),
    lambda xp, x, y, alpha: xp.where(x >= 0, 1, y + alpha),
)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """The value x where it is at least 0, else alpha (exp(x) - 1) (Clevert et al., arXiv 1511.07289)."""
    return _Elu(alpha)(x)


_HardSigmoid = _operation(
    "HardSigmoid",
    lambda xp, x, alpha, gamma: xp.minimum(xp.maximum(alpha * x + gamma, 0), 1),
    lambda xp, x, y, alpha, gamma: alpha * ((y > 0) & (y < 1)),
)


def hardsigmoid(x: Tensor, alpha: float = 0.2, gamma: float = 0.5) -> Tensor:
    """The line alpha x + gamma, limited to [0, 1]."""
    return _HardSigmoid(alpha, gamma)(x)


_LeakyRelu = _operation(
    "LeakyRelu",
    lambda xp, x, a: xp.where(x < 0, a * x, x),
    lambda xp, x, y, a: xp.where(x < 0, a, 1.0),
)


def leakyrelu(x: Tensor, a: float = 0.01) -> Tensor:
    """The value x where it is at least 0, else a x."""
    return _LeakyRelu(a)(x)


_Selu = _operation(
    "SeLU",
    lambda xp, x, alpha, gamma: gamma * xp.where(x > 0, x, alpha * xp.expm1(xp.minimum(x, 0))),
    lambda xp, x, y, alpha, gamma: xp.where(x > 0, gamma, y + gamma * alpha),
)


def selu(x: Tensor, alpha: float = 1.67326, gamma: float = 1.0507) -> Tensor:
    """Gamma times `elu` of x (Klambauer et al., arXiv 1706.02515)."""
    return _Selu(alpha, gamma)(x)


# -- activations by kernels, dropout, casts ----------------------------------------------------------------------------
class ReLU(Operation):
    """max(x, 0)."""

    def forward(self, x: Array) -> Array:
        self.saved = numerics_of(x).relu(x)
        return self.saved

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return (numerics_of(dy).relu_backward(dy, self.saved),)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return ReLU()(x)


class Sigmoid(Operation):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Array) -> Array:
        self.saved = numerics_of(x).sigmoid(x)
        return self.saved

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return (numerics_of(dy).sigmoid_backward(dy, self.saved),)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return Sigmoid()(x)


class Dropout(Operation):
    """In training, zeroes elements of x with probability `ratio` and scales the others by 1 / (1 - ratio).

    Args:
        ratio: in [0, 1).
        rng: the device's random generator.
    """

    def __init__(self, ratio: float, rng: Any) -> None:
        self.ratio, self.rng = ratio, rng

    def forward(self, x: Array) -> Array:
        if not mode.training:
            return x
        kept = self.rng.random(x.shape, dtype=x.dtype) >= self.ratio
        self.saved = kept * x.dtype.type(1 / (1 - self.ratio))
        return x * self.saved

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dy *= self.saved
        return (dy,)


def dropout(x: Tensor, ratio: float = 0.5) -> Tensor:
    """In training, zero elements of x with probability `ratio` and scale the others by 1 / (1 - ratio)."""
    if not 0 <= ratio < 1:
        raise UsageError(f"dropout ratio {ratio} is not in [0, 1)")
    return Dropout(ratio, x.device.rng)(x)


class Cast(Operation):
    """x in the type `to`. There is a gradient between floats."""

    own_type = True

    def __init__(self, to: DTypeLike) -> None:
        self.to = element_type(to)

    def forward(self, x: Array) -> Array:
        self.saved = x.dtype
        return x.astype(self.to)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return (dy.astype(self.saved) if self.saved.kind == self.to.kind == "f" else None,)


def cast(x: Tensor, to: DTypeLike) -> Tensor:
    """The values of x in the type `to`."""
    return Cast(to)(x)
