"""Operations as functions of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError
from . import operations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .tensor import Tensor

__all__ = [
    "add",
    "cat",
    "div",
    "dropout",
    "flatten",
    "matmul",
    "mse_loss",
    "mul",
    "reduce_mean",
    "reduce_sum",
    "relu",
    "reshape",
    "sigmoid",
    "softmax",
    "softmax_cross_entropy",
    "sub",
]


def add(a: Tensor, b: Tensor | float) -> Tensor:
    """`a + b`, with broadcasting."""
    return a + b


def sub(a: Tensor, b: Tensor | float) -> Tensor:
    """`a - b`, with broadcasting."""
    return a - b


def mul(a: Tensor, b: Tensor | float) -> Tensor:
    """`a * b`, with broadcasting."""
    return a * b


def div(a: Tensor, b: Tensor | float) -> Tensor:
    """`a / b`, with broadcasting."""
    return a / b


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a` [n, k] @ `b` [k, m]."""
    return a @ b


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return operations.ReLU()(x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return operations.Sigmoid()(x)


def softmax(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)) over the last dimension."""
    return operations.SoftMax()(x)


def dropout(x: Tensor, ratio: float = 0.5) -> Tensor:
    """In training, zero elements of x with probability `ratio` and scale the others by 1 / (1 - ratio)."""
    if not 0 <= ratio < 1:
        raise UsageError(f"dropout ratio {ratio} is not in [0, 1)")
    return operations.Dropout(ratio, x.device.rng)(x)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The elements of x with other dimensions, one of which may be -1."""
    return x.reshape(shape)


def flatten(x: Tensor, axis: int = 1) -> Tensor:
    """`x` as a matrix: dimensions before `axis` become rows, the others columns."""
    rows = 1
    for n in x.shape[:axis]:
        rows *= n
    return x.reshape((rows, x.size() // rows if rows else 0))


def cat(xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """The tensors `xs` joined along dimension `axis`."""
    return operations.Cat(axis)(*xs)


def reduce_sum(x: Tensor, axes: Sequence[int] | None = None, keepdims: bool = True) -> Tensor:
    """The sum over the dimensions `axes` (None: over all), which are kept with length 1 unless `keepdims` is false."""
    return operations.ReduceSum(axes, bool(keepdims))(x)


def reduce_mean(x: Tensor, axes: Sequence[int] | None = None, keepdims: bool = True) -> Tensor:
    """The mean over the dimensions `axes` (None: over all); see `reduce_sum`."""
    total = reduce_sum(x, axes, keepdims)
    return total * (total.size() / x.size())


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of the cross entropy of softmax(logits), of shape (1,).

    Args:
        logits: scores, [N, classes].
        labels: class indices of an integer type, [N], or one distribution (such as one-hot) per row, [N, classes].

    Raises:
        UsageError: a label is out of range.
    """
    return operations.SoftMaxCrossEntropy()(logits, labels)


def mse_loss(x: Tensor, target: Tensor) -> Tensor:
    """Mean over all elements of (x - target)**2, of shape (1,)."""
    return operations.MeanSquareError()(x, target)
