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

    def forward(self, x: Tensor) -> Tensor:
        """Local. The larger of x and 0, for each element x."""
        return elementwise.relu(x)


class Sigmoid(TensorLayer):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        """Local. 1 / (1 + exp(-x)), for each element x."""
        return elementwise.sigmoid(x)


class SoftMax(TensorLayer):
    """exp(x) / sum(exp(x)) over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Local. Probabilities in the shape of `x`, which add up to 1 over the last dimension."""
        return reduction.softmax(x)


class Flatten(TensorLayer):
    """Reshape to a matrix: dimensions before `axis` become rows, the others columns."""

    def __init__(self, axis: int = 1) -> None:
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Local. The elements of `x` as a matrix."""
        return shape.flatten(x, self.axis)


class Reshape(TensorLayer):
    """The same elements with the dimensions `shape`, where one may be -1."""

    def forward(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Local. The elements of `x` with the dimensions `shape`, which may differ from call to call."""
        return x.reshape(shape)


class Dropout(TensorLayer):
    """In training, zeroes elements with probability `ratio` and scales the others by 1 / (1 - ratio)."""

    def __init__(self, ratio: float = 0.5) -> None:
        self.ratio = check_number("the ratio of Dropout", ratio, "[0, 1)")

    def forward(self, x: Tensor) -> Tensor:
        """Local. A tensor like `x`; outside of training mode, its values are those of `x`."""
        return elementwise.dropout(x, self.ratio)


class Add(TensorLayer):
    """The sum of two tensors."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Local. `a + b`, with broadcasting."""
        return broadcasting.add(a, b)


class Cat(TensorLayer):
    """A list of tensors joined along dimension `axis`."""

    def __init__(self, axis: int = 0) -> None:
        self.axis = axis

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        """Local. The tensors `xs`, one at least, whose other dimensions are equal."""
        return shape.cat(xs, self.axis)


class SoftMaxCrossEntropy(TensorLayer):
    """Mean cross entropy of softmax(logits); see `loss.softmax_cross_entropy`."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Local. The loss, of shape (1,); `labels` are class indices [N], or distributions [N, classes]."""
        return loss.softmax_cross_entropy(logits, labels)


class CrossEntropy(TensorLayer):
    """Mean cross entropy of probabilities; see `loss.cross_entropy`."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Local. The loss, of shape (1,), of probabilities `x` and distributions `t`, both [N, classes]."""
        return loss.cross_entropy(x, t)


class BinaryCrossEntropy(TensorLayer):
    """Mean cross entropy of probabilities of two classes each; see `loss.binary_cross_entropy`."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Local. The loss, of shape (1,), of probabilities `x` and targets `t`, both [N, ...]."""
        return loss.binary_cross_entropy(x, t)


class MeanSquareError(TensorLayer):
    """Mean over all elements of (x - target)**2."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Local. The loss, of shape (1,), of `x` and `target` of one shape."""
        return loss.mse_loss(x, target)
