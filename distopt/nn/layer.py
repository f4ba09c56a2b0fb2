"""Layers: operations with parameters, whose shapes are determined by the first input."""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, TypeAlias

from ..errors import UsageError
from . import functions, initializer, operations
from .layer_base import Layer
from .tensor import Operation, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Add",
    "AvgPool2d",
    "BatchNorm2d",
    "Cat",
    "Conv2d",
    "DepthwiseConv2d",
    "Dropout",
    "Flatten",
    "Layer",
    "Linear",
    "MaxPool2d",
    "MeanSquareError",
    "ReLU",
    "Reshape",
    "SeparableConv2d",
    "Sigmoid",
    "SoftMax",
    "SoftMaxCrossEntropy",
]

Size: TypeAlias = "int | Sequence[int]"


def _pair(what: str, value: Size, least: int) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(pair) != 2 or any(not isinstance(n, int) or n < least for n in pair):
        raise UsageError(f"{what} is one integer or two, each at least {least}; got {value!r}")
    return pair[0], pair[1]


def _count(what: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{what} is an integer of at least 1; got {value!r}")
    return value


def _has_relu(activation: str | None) -> bool:
    if activation not in (None, "NOTSET", "RELU"):
        raise UsageError(f"unknown activation {activation!r}; choose 'RELU', or None and a layer of its own")
    return activation == "RELU"


class Conv2d(Layer):
    """Convolution (cross-correlation) of images [N, C, H, W] with bias and, optionally, ReLU.

    `Conv2d(nb_kernels, kernel_size)` takes the number of channels from the first input;
    `Conv2d(in_channels, nb_kernels, kernel_size[, stride[, padding]])` checks it. As in SINGA, the
    second form is recognized by its third positional argument.

    With `pool`, the result is pooled while it is in the cache. This gives the same bits as a separate pooling layer, is
    faster, and needs no memory for the convolution's own result. Gradients may differ in their last bits.

    Attributes:
        W: [nb_kernels, C, kh, kw].
        b: [nb_kernels], if `bias`.
    """

    W: Tensor
    b: Tensor

    def __init__(
        self,
        nb_kernels: int,
        kernel_size: Size,
        *args: Size,
        stride: Size = 1,
        padding: Size = 0,
        bias: bool = True,
        activation: str | None = None,
        pool: MaxPool2d | None = None,
    ) -> None:
        self.in_channels: int | None = None
        if args:
            if not isinstance(kernel_size, int) or len(args) > 3:
                raise UsageError(
                    "Conv2d takes (nb_kernels, kernel_size) or (in_channels, nb_kernels, kernel_size, ...)"
                )
            self.in_channels, nb_kernels, kernel_size = nb_kernels, kernel_size, args[0]
            stride = args[1] if len(args) > 1 else stride
            padding = args[2] if len(args) > 2 else padding
        self.nb_kernels = _count("nb_kernels", nb_kernels)
        self.kernel_size = _pair("kernel_size", kernel_size, 1)
        self.stride, self.padding = _pair("stride", stride, 1), _pair("padding", padding, 0)
        if pool is not None and not isinstance(pool, MaxPool2d):
            raise UsageError(f"Conv2d pools by a MaxPool2d layer; got {pool!r}")
        self.bias, self.relu, self.pool = bias, _has_relu(activation), pool

    def initialize(self, x: Tensor) -> None:  # noqa: D102
        self.in_channels = self._channels(x, self.in_channels)
        self.W = self._parameter("W", (self.nb_kernels, self.in_channels, *self.kernel_size), x)
        # SINGA's choice, which makes accuracies comparable.
        initializer.gaussian(self.W, 0.0, sqrt(2 / (self.in_channels * prod(self.kernel_size) + self.nb_kernels)))
        if self.bias:
            self.b = self._parameter("b", (self.nb_kernels,), x)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        assert self.in_channels is not None
        self._check_images(x, self.in_channels, self.W)
        inputs = (x, self.W, self.b) if self.bias else (x, self.W)
        return self._run(self._operation(), *inputs)

    def _operation(self) -> Operation:
        if self.pool is None:
            return operations.Conv2d(self.stride, self.padding, self.relu)
        window = self.pool.kernel_size, self.pool.stride, self.pool.padding
        return operations.Conv2dMaxPool(self.stride, self.padding, self.relu, window)


class DepthwiseConv2d(Layer):
    """Convolution of each channel of images [N, C, H, W] with its own kernel; C is checked if given.

    Attributes:
        W: [C, kh, kw].
    """

    W: Tensor

    def __init__(self, kernel_size: Size, stride: Size = 1, padding: Size = 0, channels: int | None = None) -> None:
        self.channels = channels
        self.kernel_size = _pair("kernel_size", kernel_size, 1)
        self.stride, self.padding = _pair("stride", stride, 1), _pair("padding", padding, 0)

    def initialize(self, x: Tensor) -> None:  # noqa: D102
        self.channels = self._channels(x, self.channels)
        self.W = self._parameter("W", (self.channels, *self.kernel_size), x)
        initializer.gaussian(self.W, 0.0, sqrt(2 / prod(self.kernel_size)))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        assert self.channels is not None
        self._check_images(x, self.channels, self.W)
        return self._run(operations.DepthwiseConv2d(self.stride, self.padding), x, self.W)


class SeparableConv2d(Layer):
    """A depthwise convolution, then one with 1x1 kernels (Chollet, arXiv 1610.02357).

    Takes its arguments in either form of `Conv2d`.
    """

    def __init__(
        self,
        nb_kernels: int,
        kernel_size: Size,
        *args: Size,
        stride: Size = 1,
        padding: Size = 0,
        bias: bool = False,
    ) -> None:
        whole = Conv2d(nb_kernels, kernel_size, *args, stride=stride, padding=padding)
        self.depthwise_conv = DepthwiseConv2d(whole.kernel_size, whole.stride, whole.padding, whole.in_channels)
        self.point_conv = Conv2d(whole.nb_kernels, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y: Tensor = self.point_conv(self.depthwise_conv(x))
        return y


class Linear(Layer):
    """x [N, in] @ W + b, optionally with ReLU.

    `Linear(out_features)` takes the number of inputs from the first input; `Linear(in_features, out_features)`
    checks it.

    Attributes:
        W: [in, out].
        b: [out], if `bias`.
    """

    W: Tensor
    b: Tensor

    def __init__(self, out_features: int, *args: int, bias: bool = True, activation: str | None = None) -> None:
        if len(args) > 1:
            raise UsageError("Linear takes (out_features) or (in_features, out_features)")
        self.in_features = out_features if args else None
        self.out_features = _count("out_features", args[0] if args else out_features)
        self.bias, self.relu = bias, _has_relu(activation)

    def initialize(self, x: Tensor) -> None:  # noqa: D102
        if self.in_features is None:
            self._check_matrix(x)
            self.in_features = x.shape[1]
        self.W = self._parameter("W", (self.in_features, self.out_features), x)
        initializer.glorot_normal(self.W)
        if self.bias:
            self.b = self._parameter("b", (self.out_features,), x)

    def _check_matrix(self, x: Tensor) -> None:
        if len(x.shape) != 2:
            raise UsageError(f"{self.label} expects rows [N, inputs], got {list(x.shape)}; put a Flatten before it")

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        self._check_matrix(x)
        if x.shape[1] != self.in_features:
            raise UsageError(f"{self.label} expects {self.in_features} inputs, got {x.shape[1]}")
        self._check_dtype(x, self.W)
        operation = operations.Linear(self.relu)
        return operation(x, self.W, self.b) if self.bias else operation(x, self.W)


class _Pool2d(Layer):
    operation: type[operations.MaxPool2d | operations.AvgPool2d]

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        self.kernel_size = _pair("kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else _pair("stride", stride, 1)
        self.padding = _pair("padding", padding, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self.operation(self.kernel_size, self.stride, self.padding), x)


class MaxPool2d(_Pool2d):
    """The maximum of each window of images [N, C, H, W]; the default stride is the window's size."""

    operation = operations.MaxPool2d


class AvgPool2d(_Pool2d):
    """The mean of each window of images [N, C, H, W], with padding counted as zeros; stride as in `MaxPool2d`."""

    operation = operations.AvgPool2d


class BatchNorm2d(Layer):
    """Batch normalization of images [N, C, H, W] per channel (Ioffe and Szegedy, arXiv 1502.03167).

    `BatchNorm2d(channels)` checks the number of channels; by default it comes from the first input.

    Args:
        momentum: weight of the old value in a running statistic (PyTorch's momentum is 1 minus this).
        eps: added to the variance.

    Attributes:
        scale: [C]; initially 1.
        bias: [C]; initially 0.
        running_mean: [C], a state.
        running_var: [C], a state.
    """

    scale: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int | None = None, momentum: float = 0.9, eps: float = 1e-5) -> None:
        if not 0 <= momentum <= 1:
            raise UsageError(f"momentum {momentum} is not in [0, 1]")
        self.channels, self.momentum, self.eps = channels, momentum, eps

    def initialize(self, x: Tensor) -> None:  # noqa: D102
        self.channels = self._channels(x, self.channels)
        self.scale, self.bias = (self._parameter(key, (self.channels,), x) for key in ("scale", "bias"))
        self.scale.set_value(1)
        self.running_mean = Tensor((self.channels,), x.device, self.scale.dtype)
        self.running_var = Tensor((self.channels,), x.device, self.scale.dtype)
        self.running_var.set_value(1)

    def own_states(self) -> dict[str, Tensor]:  # noqa: D102
        return {"running_mean": self.running_mean, "running_var": self.running_var} if self._ready else {}

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        assert self.channels is not None
        self._check_images(x, self.channels, self.scale)
        running = self.running_mean.array, self.running_var.array
        return self._run(operations.BatchNorm2d(*running, 1 - self.momentum, self.eps), x, self.scale, self.bias)


class ReLU(Layer):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functions.relu(x)


class Sigmoid(Layer):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functions.sigmoid(x)


class SoftMax(Layer):
    """exp(x) / sum(exp(x)) over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functions.softmax(x)


class Flatten(Layer):
    """Reshape to a matrix: dimensions before `axis` become rows, the others columns."""

    def __init__(self, axis: int = 1) -> None:
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functions.flatten(x, self.axis)


class Reshape(Layer):
    """The same elements with the dimensions `shape`, one of which may be -1."""

    def forward(self, x: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: D102
        return x.reshape(shape)


class Dropout(Layer):
    """In training, zeroes elements with probability `ratio` and scales the others by 1 / (1 - ratio)."""

    def __init__(self, ratio: float = 0.5) -> None:
        if not 0 <= ratio < 1:
            raise UsageError(f"dropout ratio {ratio} is not in [0, 1)")
        self.ratio = ratio

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functions.dropout(x, self.ratio)


class Add(Layer):
    """The sum of two tensors."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # noqa: D102
        return functions.add(a, b)


class Cat(Layer):
    """A list of tensors joined along dimension `axis`."""

    def __init__(self, axis: int = 0) -> None:
        self.axis = axis

    def forward(self, xs: Sequence[Tensor]) -> Tensor:  # noqa: D102
        return functions.cat(xs, self.axis)


class SoftMaxCrossEntropy(Layer):
    """Mean cross entropy of softmax(logits); see `functions.softmax_cross_entropy`."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        return functions.softmax_cross_entropy(logits, labels)


class MeanSquareError(Layer):
    """Mean over all elements of (x - target)**2."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # noqa: D102
        return functions.mse_loss(x, target)
