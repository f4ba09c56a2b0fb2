"""Losses: means over a batch, of shape (1,)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeAlias

from ...errors import ShapeError, UsageError
from ...kernels import array_module
from ..core.array import Array, float32, settled
from ..core.operation import Arrays, Operation, wants_gradient
from ..core.tensor import Tensor
from ..numerics import numerics_of

Formula: TypeAlias = Callable[..., Array]  # of array module, x and t

__all__ = [
    "binary_cross_entropy",
    "cross_entropy",
    "mse_loss",
    "ranking_loss",
    "softmax_cross_entropy",
]


class SoftMaxCrossEntropy(Operation):
    """Mean over the batch of the cross entropy of softmax(logits [N, classes]), as an array of shape (1,).

    The labels are integers [N] or one distribution per row, [N, classes]; they have no gradient.
    """

    own_type = True

    def forward(self, logits: Array, labels: Array) -> Array:
        _check_labels(logits, labels)
        loss, self.saved = numerics_of(logits).softmax_cross_entropy(logits, labels)
        return loss.reshape(1)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return numerics_of(dy).softmax_cross_entropy_backward(self.saved, dy), None


def _check_labels(logits: Array, labels: Array) -> None:
    if logits.ndim != 2:
        raise ShapeError(f"cross entropy takes scores [N, classes], got {list(logits.shape)}; put a Flatten before it")
    n, classes = logits.shape
    if classes == 0:
        raise ShapeError(f"scores [{n}, 0] have no class; cross entropy takes scores [N, classes]")
    if labels.shape not in ((n,), (n, classes)):
        raise ShapeError(
            f"scores [{n}, {classes}] need {n} labels: class indices [{n}], or distributions [{n}, {classes}]; got "
            f"{list(labels.shape)}"
        )
    if labels.ndim == 1 and labels.dtype.kind not in "biu":
        raise UsageError(f"labels [N] are class indices, got {labels.dtype}; make them tensor.int32")


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of the cross entropy of softmax(logits), of shape (1,).

    Args:
        logits: scores, [N, classes].
        labels: class indices of an integer type, [N], or one distribution (such as one-hot) per row, [N, classes].

    Raises:
        UsageError: a label is out of range.
        ShapeError: the shapes do not fit.
    """
    return SoftMaxCrossEntropy()(logits, labels)


def _floats(*arrays: Array) -> list[Array]:
    """The arrays, integers among them as float32: a difference of integers may lie outside their type."""
    return [x if x.dtype.kind == "f" else x.astype(float32) for x in arrays]


class _Loss(Operation):
    """The sum of a term for each element of x, divided by the length of the batch."""

    own_type = True

    term: ClassVar[Formula]
    slope: ClassVar[Formula]  # the derivative of `term` in x

    def forward(self, x: Array, t: Array) -> Array:
        if x.shape != t.shape:
            raise ShapeError(f"{type(self).__name__} needs equal shapes, got {x.shape} and {t.shape}")
        self.saved = x, array_module(x).asarray(t, x.dtype)
        return settled(self.term(array_module(x), *self.saved).sum() / max(len(x), 1), x).reshape(1)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        x, t = self.saved
        dy /= max(len(x), 1)
        return self.slope(array_module(x), x, t) * dy, None


def _loss(name: str, term: Formula, slope: Formula) -> type[_Loss]:
    return type(name, (_Loss,), {"term": staticmethod(term), "slope": staticmethod(slope)})


# -- a term of the elements x and t, and its derivative in x -----------------------------------------------------------
CrossEntropy = _loss("CrossEntropy", lambda xp, x, t: -t * xp.log(x), lambda xp, x, t: -t / x)


def cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    """Mean over the batch of the cross entropy of probabilities `x` [N, classes] and distributions `t` [N, classes]."""
    return CrossEntropy()(x, t)


_MARGIN = 1e-4  # SINGA's
BinaryCrossEntropy = _loss(
    "BinaryCrossEntropy",
    lambda xp, x, t: (t - 1) * xp.log(1 + _MARGIN - x) - t * xp.log(x + _MARGIN),
    lambda xp, x, t: (1 - t) / (1 + _MARGIN - x) - t / (x + _MARGIN),
)


def binary_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    """Mean over the batch of the sum of -t log(x + e) - (1 - t) log(1 - x + e), where e is 0.0001 as in SINGA.

    Args:
        x: probabilities, [N, ...].
        t: targets, of the shape of x.
    """
    return BinaryCrossEntropy()(x, t)


class RankingLoss(Operation):
    """max(0, margin - positive + negative), summed over the pairs, and divided by the length of the batch."""

    own_type = True

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def forward(self, positive: Array, negative: Array) -> Array:
        if positive.shape != negative.shape:
            raise ShapeError(f"RankingLoss needs equal shapes, got {positive.shape} and {negative.shape}")
        positive, negative = _floats(positive, negative)
        excess = negative - positive + self.margin
        self.saved = excess > 0
        n = max(len(positive), 1)
        return settled((excess * self.saved).sum() / n, positive).reshape(1)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dy /= max(len(self.saved), 1)
        return -dy * self.saved, dy * self.saved


def ranking_loss(pos: Tensor, neg: Tensor, M: float = 0.2) -> Tensor:
    """Mean over the batch of max(0, M - pos + neg): the scores `pos` should exceed `neg` by the margin M."""
    return RankingLoss(M)(pos, neg)


class MeanSquareError(Operation):
    """Mean over all elements of (x - target)**2, as an array of shape (1,); 0 without elements."""

    own_type = True

    def forward(self, x: Array, target: Array) -> Array:
        if x.shape != target.shape:
            raise ShapeError(f"the mean square error needs equal shapes, got {x.shape} and {target.shape}")
        x, target = _floats(x, target)
        self.saved = x - target
        squares = array_module(x).square(self.saved)
        return (squares.mean() if x.size else squares.sum()).reshape(1)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dx = self.saved * (self.saved.dtype.type(2 / max(self.saved.size, 1)) * dy)
        assert self.inputs is not None
        return dx, -dx if wants_gradient(self.inputs[1]) else None


def mse_loss(x: Tensor, target: Tensor) -> Tensor:
    """Mean over all elements of (x - target)**2, of shape (1,); 0 without elements."""
    return MeanSquareError()(x, target)
