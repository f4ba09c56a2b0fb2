"""The operations of neural networks, on the kernels of `distopt.nn.kernels`; images are in `operations_images`.

Shapes: images are [N, C, H, W], rows are [N, features]. Weights come after their inputs. Parameter gradients are
written into the memory provided (`into`, see `Operation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from ...errors import ShapeError, UsageError
from ...kernels import array_module
from ..core.array import Array, settled
from ..core.mode import mode
from ..core.operation import Operation
from ..core.tensor import Tensor
from ..kernels import kernels_of
from .images import Weighted

Into: TypeAlias = "Sequence[Array | None]"
Gradients: TypeAlias = "Sequence[Array | None]"


def wants_gradient(tensor: Tensor) -> bool:
    """Local. Whether a backward pass needs the gradient of `tensor`, which may else be constant data of a script."""
    return (tensor.stores_grad and tensor.requires_grad) or tensor.in_graph


class Linear(Weighted):
    """x [N, in] @ w [in, out], plus b [out] if given, optionally with ReLU."""

    native = True

    def __init__(self, relu: bool = False) -> None:
        self.relu = relu

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        y, self.saved = kernels_of(x).linear(x, w, b, self.relu)
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dw, *db = self.gradient_memory(into)
        dx = kernels_of(dy).linear_backward(dy, self.saved, dw, db[0] if db else None, self.needs[0])
        return dx, dw, *db


class ReLU(Operation):
    """max(x, 0)."""

    native = True

    def forward(self, x: Array) -> Array:
        self.saved = kernels_of(x).relu(x)
        return self.saved

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return (kernels_of(dy).relu_backward(dy, self.saved),)


class Sigmoid(Operation):
    """1 / (1 + exp(-x))."""

    native = True

    def forward(self, x: Array) -> Array:
        self.saved = kernels_of(x).sigmoid(x)
        return self.saved

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return (kernels_of(dy).sigmoid_backward(dy, self.saved),)


class SoftMax(Operation):
    """exp(x) / sum(exp(x)) over the dimension `axis`."""

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Array) -> Array:
        dense = array_module(x).ascontiguousarray
        rows = dense(x.swapaxes(self.axis, -1))
        y = kernels_of(x).softmax(rows.reshape(-1, rows.shape[-1])) if x.size else rows
        self.saved = dense(y.reshape(rows.shape).swapaxes(self.axis, -1))
        return self.saved

    def gradients(self, dy: Array, into: Into) -> Gradients:
        y = self.saved
        dy *= y
        return (dy - y * dy.sum(axis=self.axis, keepdims=True),)


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

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dy *= self.saved
        return (dy,)


class Cat(Operation):
    """Arrays joined along dimension `axis`."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, *parts: Array) -> Array:
        self.saved = [*accumulate(part.shape[self.axis] for part in parts)][:-1]
        return array_module(parts[0]).concatenate(parts, self.axis)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        parts = array_module(dy).split(dy, self.saved, self.axis)
        return [part.copy() if need else None for part, need in zip(parts, self.needs, strict=True)]


class ReduceSum(Operation):
    """The sum over the dimensions `axes` (None: over all), which are kept with length 1 or removed."""

    def __init__(self, axes: Sequence[int] | None, keepdims: bool) -> None:
        self.axes, self.keepdims = None if axes is None else tuple(axes), keepdims

    def forward(self, x: Array) -> Array:
        y = x.sum(axis=self.axes, keepdims=True)
        self.saved = x.shape, y.shape
        return y if self.keepdims else y.squeeze(self.axes)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        x_shape, kept_shape = self.saved
        return (array_module(dy).broadcast_to(dy.reshape(kept_shape), x_shape).copy(),)


class ReduceMean(ReduceSum):
    """The mean over the dimensions `axes`; see `ReduceSum`."""

    def forward(self, x: Array) -> Array:
        y = super().forward(x)
        self.share = y.size / max(x.size, 1)
        return settled(y * self.share, x)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        (dx,) = super().gradients(dy, into)
        dx *= self.share
        return (dx,)


class SoftMaxCrossEntropy(Operation):
    """Mean over the batch of the cross entropy of softmax(logits [N, classes]), as an array of shape (1,).

    The labels are integers [N] or one distribution per row, [N, classes]; they have no gradient.
    """

    native = own_type = True

    def forward(self, logits: Array, labels: Array) -> Array:
        _check_labels(logits, labels)
        loss, self.saved = kernels_of(logits).softmax_cross_entropy(logits, labels)
        return loss.reshape(1)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return kernels_of(dy).softmax_cross_entropy_backward(self.saved, dy), None


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


class MeanSquareError(Operation):
    """Mean over all elements of (x - target)**2, as an array of shape (1,); 0 without elements."""

    own_type = True

    def forward(self, x: Array, target: Array) -> Array:
        if x.shape != target.shape:
            raise ShapeError(f"the mean square error needs equal shapes, got {x.shape} and {target.shape}")
        self.saved = x - target
        squares = array_module(x).square(self.saved)
        return (squares.mean() if x.size else squares.sum()).reshape(1)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dx = self.saved * (self.saved.dtype.type(2 / max(self.saved.size, 1)) * dy)
        assert self.inputs is not None
        return dx, -dx if wants_gradient(self.inputs[1]) else None
