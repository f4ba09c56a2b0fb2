"""Operations as functions of tensors; the names are SINGA's. Each result has the operation as its creator.

Elementwise operations come from `elementwise`, and those that move or choose elements from `rearrange` and `indices`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ...errors import ShapeError, UsageError
from ..core.arithmetic import Add, Div, MatMul, Mul, Sub
from ..core.tensor import Tensor
from . import combine, elementwise, operations, rows
from . import index as indices
from . import shape as rearrange
from .elementwise import *  # noqa: F403 - part of this module's names
from .index import *  # noqa: F403
from .shape import *  # noqa: F403
from .shape import axes_of, several

__all__ = [
    "add",
    "add_all",
    "add_bias",
    "binary_cross_entropy",
    "cossim",
    "cross_entropy",
    "div",
    "dropout",
    "equal",
    "gemm",
    "globalaveragepool",
    "greater",
    "less",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matmul",
    "max",
    "mean",
    "min",
    "mse_loss",
    "mul",
    "pow",
    "prelu",
    "ranking_loss",
    "reduce_mean",
    "reduce_sum",
    "relu",
    "sigmoid",
    "softmax",
    "softmax_cross_entropy",
    "sub",
    "sum",
    "where",
]
__all__ += elementwise.__all__
__all__ += indices.__all__
__all__ += rearrange.__all__


# -- arithmetic ----------------------------------------------------------------------------------------------------
def add(a: Tensor, b: Tensor | float) -> Tensor:
    """`a + b`, with broadcasting."""
    return Add()(a, a.operand(b))


def sub(a: Tensor, b: Tensor | float) -> Tensor:
    """`a - b`, with broadcasting."""
    return Sub()(a, a.operand(b))


def mul(a: Tensor, b: Tensor | float) -> Tensor:
    """`a * b`, with broadcasting."""
    return Mul()(a, a.operand(b))


def div(a: Tensor, b: Tensor | float) -> Tensor:
    """`a / b`, with broadcasting."""
    return Div()(a, a.operand(b))


def pow(a: Tensor, b: Tensor | float) -> Tensor:
    """`a` to the power `b`, with broadcasting. The gradient of `b` is 0 where `a` is 0."""
    return combine.Pow()(a, a.operand(b))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a` [..., n, k] @ `b` [..., k, m]; the dimensions before the last two are broadcast."""
    return MatMul()(a, b)


def gemm(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """`alpha` A' B' + `beta` C [N, M].

    Args:
        A: A' [N, K], or its transpose if `transA`.
        B: B' [K, M], or its transpose if `transB`.
        C: may be broadcast to [N, M]; by default 0.
        alpha: factor of the product.
        beta: factor of C.
        transA: see A.
        transB: see B.
    """
    operands: tuple[Tensor, ...] = (A, B) if C is None else (A, B, C)
    return rows.Gemm(alpha, beta, bool(transA), bool(transB))(*operands)


def add_bias(x: Tensor, b: Tensor, axis: int = 0) -> Tensor:
    """`x` [N, M] with `b` [M] added to each row, or with `axis` 1, `b` [N] added to each column."""
    if axis not in (0, 1) or x.ndim() != 2 or b.shape != x.shape[1 - axis : 2 - axis]:
        raise ShapeError(
            f"add_bias takes x [N, M], and b [M] for axis 0, or b [N] for axis 1; got {x.shape}, {b.shape}, axis {axis}"
        )
    return rows.AddBias(axis)(x, b)


def add_all(*xs: Tensor) -> Tensor:
    """The sum of tensors, with broadcasting; as `sum`."""
    return sum(*xs)


def sum(*xs: Tensor) -> Tensor:
    """The sum of tensors, element by element, with broadcasting; `reduce_sum` adds the elements of one."""
    return combine.Sum()(*xs)


def mean(*xs: Tensor) -> Tensor:
    """The mean of tensors, element by element, with broadcasting."""
    return combine.Mean()(*xs)


def max(*xs: Tensor) -> Tensor:
    """The greatest of tensors, element by element, with broadcasting. The first of equal ones has the gradient."""
    return combine.Max()(*xs)


def min(*xs: Tensor) -> Tensor:
    """The least of tensors, element by element, with broadcasting. The first of equal ones has the gradient."""
    return combine.Min()(*xs)


def where(x: Tensor, y: Tensor | float, condition: Tensor | ArrayLike) -> Tensor:
    """`x` where the condition holds (is not 0), else `y`, with broadcasting."""
    given = condition.array if isinstance(condition, Tensor) else np.asarray(condition)
    return combine.Where(x.device.xp.asarray(given != 0))(x, x.operand(y))


# -- comparisons and logic: 1.0 for true, 0.0 for false, without a gradient ----------------------------------------
def greater(x: Tensor, y: Tensor | float) -> Tensor:
    """1.0 where `x > y`, else 0.0."""
    return combine.Truth("greater")(x, x.operand(y))


def less(x: Tensor, y: Tensor | float) -> Tensor:
    """1.0 where `x < y`, else 0.0."""
    return combine.Truth("less")(x, x.operand(y))


def equal(x: Tensor, y: Tensor | float) -> Tensor:
    """1.0 where `x == y`, else 0.0."""
    return combine.Truth("equal")(x, x.operand(y))


def logical_and(a: Tensor, b: Tensor) -> Tensor:
    """1.0 where both are not 0, else 0.0."""
    return combine.Truth("logical_and")(a, b)


def logical_or(a: Tensor, b: Tensor) -> Tensor:
    """1.0 where one is not 0, else 0.0."""
    return combine.Truth("logical_or")(a, b)


def logical_xor(a: Tensor, b: Tensor) -> Tensor:
    """1.0 where one, and only one, is not 0, else 0.0."""
    return combine.Truth("logical_xor")(a, b)


def logical_not(x: Tensor) -> Tensor:
    """1.0 where `x` is 0, else 0.0."""
    return combine.Truth("logical_not")(x)


# -- networks ------------------------------------------------------------------------------------------------------
def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return operations.ReLU()(x)


def prelu(x: Tensor, slope: Tensor | float) -> Tensor:
    """The value x where it is at least 0, else `slope` x, with broadcasting (He et al., arXiv 1502.01852)."""
    return combine.PRelu()(x, x.operand(slope))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return operations.Sigmoid()(x)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) over the dimension `axis`."""
    (axis,) = axes_of(x, axis)
    return operations.SoftMax(axis)(x)


def dropout(x: Tensor, ratio: float = 0.5) -> Tensor:
    """In training, zero elements of x with probability `ratio` and scale the others by 1 / (1 - ratio)."""
    if not 0 <= ratio < 1:
        raise UsageError(f"dropout ratio {ratio} is not in [0, 1)")
    return operations.Dropout(ratio, x.device.rng)(x)


def globalaveragepool(x: Tensor, data_format: str = "channels_first") -> Tensor:
    """The mean of each channel of images [N, C, H, W]: [N, C, 1, 1].

    With `data_format` "channels_last", images are [N, H, W, C], and the result is [N, 1, 1, C].
    """
    first = 2 if data_format == "channels_first" else 1
    if data_format not in ("channels_first", "channels_last", "channel_last") or x.ndim() < 3:
        raise UsageError(
            f"globalaveragepool takes images, 'channels_first' or 'channels_last'; got {x.shape} and {data_format!r}"
        )
    return operations.ReduceMean(range(first, first + x.ndim() - 2), keepdims=True)(x)


def reduce_sum(x: Tensor, axes: int | Sequence[int] | None = None, keepdims: bool = True) -> Tensor:
    """The sum over the dimensions `axes` (None: over all), which are kept with length 1 unless `keepdims` is false."""
    return operations.ReduceSum(None if axes is None else axes_of(x, *several(axes)), bool(keepdims))(x)


def reduce_mean(x: Tensor, axes: int | Sequence[int] | None = None, keepdims: bool = True) -> Tensor:
    """The mean over the dimensions `axes` (None: over all); see `reduce_sum`."""
    return operations.ReduceMean(None if axes is None else axes_of(x, *several(axes)), bool(keepdims))(x)


def cossim(a: Tensor, b: Tensor) -> Tensor:
    """The cosine of the angle between each row of `a` [N, M] and that of `b` [N, M]: [N]."""
    if a.ndim() != 2 or a.shape != b.shape:
        raise ShapeError(f"cossim compares the rows of two tensors of one shape [N, M]; got {a.shape} and {b.shape}")
    return rows.CosSim()(a, b)


# -- losses, of shape (1,) -----------------------------------------------------------------------------------------
def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of the cross entropy of softmax(logits), of shape (1,).

    Args:
        logits: scores, [N, classes].
        labels: class indices of an integer type, [N], or one distribution (such as one-hot) per row, [N, classes].

    Raises:
        UsageError: a label is out of range.
        ShapeError: the shapes do not fit.
    """
    return operations.SoftMaxCrossEntropy()(logits, labels)


def cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    """Mean over the batch of the cross entropy of probabilities `x` [N, classes] and distributions `t` [N, classes]."""
    return rows.CrossEntropy()(x, t)


def binary_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    """Mean over the batch of the sum of -t log(x + e) - (1 - t) log(1 - x + e), where e is 0.0001 as in SINGA.

    Args:
        x: probabilities, [N, ...].
        t: targets, of the shape of x.
    """
    return rows.BinaryCrossEntropy()(x, t)


def ranking_loss(pos: Tensor, neg: Tensor, M: float = 0.2) -> Tensor:
    """Mean over the batch of max(0, M - pos + neg): the scores `pos` should exceed `neg` by the margin M."""
    return rows.RankingLoss(M)(pos, neg)


def mse_loss(x: Tensor, target: Tensor) -> Tensor:
    """Mean over all elements of (x - target)**2, of shape (1,); 0 without elements."""
    return operations.MeanSquareError()(x, target)
