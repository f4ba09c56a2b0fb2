"""Operations that scripts define as in SINGA: a class with `forward` and `backward` on raw tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from ..kernels import array_module
from ..nn.core.array import Array, settled
from ..nn.core.operation import Operation
from ..nn.core.raw import raw
from ..nn.core.tensor import Tensor


class Operator:
    """SINGA's base class of operations. `MyOperator()(x)[0]` is the result of `MyOperator.forward`, as a tensor.

    Subclasses implement `forward(self, *xs)`, which returns one array, and `backward(self, dy)`, which returns the
    gradient of the input, or a tuple of one for each input. All arguments are raw tensors; results may be any arrays of
    their device. Attributes keep the arrays that `backward` needs; an instance is used for one call.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = type(self).__name__ if name is None else name

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Compute; record the call in training mode."""
        return (_operation_of(type(self))(self)(*xs),)  # type: ignore[arg-type] # a class is hashable

    def get_params(self) -> list[Tensor]:
        """None; SINGA's method for subclasses."""
        return []

    def output_name(self, idx: int) -> str:
        """SINGA's name for result number `idx`."""
        return f"{self.name}:{idx}"

    def grad_name(self, idx: int) -> str:
        """SINGA's name for its gradient."""
        return f"{self.output_name(idx)}_g"

    def forward(self, *xs: Array) -> Array:
        """The result."""
        raise NotImplementedError

    def backward(self, *dys: Array) -> Any:
        """The gradient of each input, given the gradient of the result."""
        raise NotImplementedError


class _Scripted(Operation):
    """A call of an `Operator`. It copies all arrays that come from the script, which may keep or return its own."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def forward(self, *xs: Array) -> Array:
        ys = self.operator.forward(*map(raw, xs))
        (y, *more) = ys if isinstance(ys, tuple) else (ys,)
        if more:
            raise UsageError(
                f"{self.operator.name}.forward returned {len(ys)} results, and an operator has one; return one array, "
                "joined if need be, and divide it with autograd.split"
            )
        return settled(array_module(xs[0]).array(_plain(y), order="C"), *xs)

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        assert self.inputs is not None
        dxs = self.operator.backward(raw(dy))
        dxs = [_plain(dx) for dx in (dxs if isinstance(dxs, (list, tuple)) else (dxs,))]
        got = [None if dx is None else tuple(dx.shape) for dx in dxs]
        expected = [x.shape for x in self.inputs]
        if len(got) != len(expected) or any(g not in (None, e) for g, e in zip(got, expected, strict=True)):
            raise UsageError(
                f"{self.operator.name}.backward returned gradients of shapes {got} for inputs of shapes {expected}; "
                "return one for each, or None where there is none"
            )
        array = array_module(dy).array
        return [None if dx is None else array(dx, dy.dtype, order="C") for dx in dxs]


@functools.cache
def _operation_of(operator: type[Operator]) -> type[_Scripted]:
    """`_Scripted`, by the name of the operator, which appears in messages and time tables."""
    return type(operator.__name__, (_Scripted,), {})


def _plain(value: Any) -> Any:
    return value.array if isinstance(value, Tensor) else value
