"""Layers without parameters: functions of `ops` as layers, losses among them."""

from __future__ import annotations

from collections.abc import Sequence

from ...checks import check_number
from ..core.tensor import Tensor
from ..ops import broadcasting, elementwise, loss, reduction, shape
from .base import TensorLayer

__all__ = [
    "Add",
    "BinaryCrossEntropy",
    "Cat",
    "CrossEntropy",
    "Dropout",
    "Flatten",
    "MeanSquareError",
    "ReLU",
    "Reshape",
    "Sigmoid",
    "SoftMax",
    "SoftMaxCrossEntropy",
]


class ReLU(TensorLayer):
    """max(x, 0)."""

    forward = staticmethod(elementwise.relu)


class Sigmoid(TensorLayer):
    """1 / (1 + exp(-x))."""

    forward = staticmethod(elementwise.sigmoid)


class SoftMax(TensorLayer):
    """exp(x) / sum(exp(x)) over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities in the shape of `x`, which add up to 1 over the last dimension."""
        return reduction.softmax(x)


class Flatten(TensorLayer):
    """Reshape to a matrix: dimensions before `axis` become rows, the others columns."""

    def __init__(self, axis: int = 1) -> None:
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """The elements of `x` as a matrix."""
        return shape.flatten(x, self.axis)


class Reshape(TensorLayer):
    """The same elements with the dimensions `shape`, where one may be -1."""

    def forward(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The elements of `x` with the dimensions `shape`, which may differ from call to call."""
        return x.reshape(shape)


class Dropout(TensorLayer):
    """In training, zeroes elements with probability `ratio` and scales the others by 1 / (1 - ratio)."""

    def __init__(self, ratio: float = 0.5) -> None:
        self.ratio = check_number("the ratio of Dropout", ratio, "[0, 1)")

    def forward(self, x: Tensor) -> Tensor:
        """A tensor like `x`; outside of training mode, its values are those of `x`."""
        return elementwise.dropout(x, self.ratio)


class Add(TensorLayer):
    """The sum of two tensors."""

    forward = staticmethod(broadcasting.add)


class Cat(TensorLayer):
    """A list of tensors joined along dimension `axis`."""

    def __init__(self, axis: int = 0) -> None:
        self.axis = axis

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        """The tensors `xs`, one at least, whose other dimensions are equal."""
        return shape.cat(xs, self.axis)


class SoftMaxCrossEntropy(TensorLayer):
    """Mean cross entropy of softmax(logits); see `loss.softmax_cross_entropy`."""

    forward = staticmethod(loss.softmax_cross_entropy)


class CrossEntropy(TensorLayer):
    """Mean cross entropy of probabilities; see `loss.cross_entropy`."""

    forward = staticmethod(loss.cross_entropy)


class BinaryCrossEntropy(TensorLayer):
    """Mean cross entropy of probabilities of two classes each; see `loss.binary_cross_entropy`."""

    forward = staticmethod(loss.binary_cross_entropy)


class MeanSquareError(TensorLayer):
    """Mean over all elements of (x - target)**2."""

    forward = staticmethod(loss.mse_loss)
