"""Layers for images [N, C, H, W]: convolution, pooling and normalization."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import TypeAlias

from ...errors import ShapeError, UsageError, check_integer
from ..core.mode import mode
from ..core.operation import Operation
from ..core.tensor import Tensor
from ..kernels.geometry import Padding, Pair, same_padding
from ..ops import images as operations
from ..optim.schedules import checked
from .base import TensorLayer, has_relu

__all__ = [
    "AvgPool1d",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "MaxPool1d",
    "MaxPool2d",
    "Pooling2d",
    "SeparableConv2d",
    "SyncBatchNorm2d",
]

Size: TypeAlias = "int | Sequence[int]"

_PAD_MODES = ("NOTSET", "SAME_UPPER", "SAME_LOWER")


def _pair(what: str, value: Size | None) -> Pair:
    pair = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(pair) != 2:
        raise UsageError(f"{what} is one integer or two; got {value!r}")
    return check_integer(what, pair[0], 1), check_integer(what, pair[1], 1)


def _padding(value: Size | None) -> Padding:
    given = value if isinstance(value, (list, tuple)) else (value, value)
    if len(given) not in (2, 4):
        raise UsageError(f"padding is one integer, two, or four (top, bottom, left, right); got {value!r}")
    padding = tuple(check_integer("padding", n, 0) for n in given)
    return padding[::2] if len(padding) == 4 and padding[::2] == padding[1::2] else padding


class _Windowed(TensorLayer):
    """A layer that slides a window over images."""

    def __init__(self, kernel_size: Size, stride: Size, padding: Size | None, pad_mode: str) -> None:
        self.kernel_size, self.stride = _pair("kernel_size", kernel_size), _pair("stride", stride)
        if pad_mode not in _PAD_MODES:
            raise UsageError(f"unknown pad_mode {pad_mode!r}; choose one of {', '.join(_PAD_MODES)}")
        self.padding = _padding(padding) if pad_mode == "NOTSET" else (0, 0)
        self.pad_mode = pad_mode

    def _padding_of(self, x: Tensor) -> Padding:
        if self.pad_mode == "NOTSET":
            return self.padding
        return same_padding(x.array.shape, self.kernel_size, self.stride, self.pad_mode == "SAME_UPPER")


class Conv2d(_Windowed):
    """Convolution (cross-correlation) of images [N, C, H, W] with bias and, optionally, ReLU.

    `Conv2d(nb_kernels, kernel_size)` takes the number of channels from the first input;
    `Conv2d(in_channels, nb_kernels, kernel_size[, stride[, padding]])` checks it. As in SINGA, the
    second form is recognized by its third positional argument.

    With `pool`, the result is pooled while it is in the cache. This gives the same bits as a separate pooling layer, is
    faster, and needs no memory for the convolution's own result. Gradients may differ in their last bits.

    Args:
        nb_kernels: number of kernels, the channels of the result.
        kernel_size: one integer or two, height and width; so is `stride`.
        args: see above.
        stride: rows and columns from one window to the next.
        padding: zeros around the images: one integer, two (rows, columns), or four (top, bottom, left, right).
        dilation: 1; as in SINGA, no other value is supported.
        group: number of groups of channels, each with its own kernels.
        bias: whether to add a bias.
        pad_mode: "SAME_UPPER" or "SAME_LOWER": instead of `padding`, pad so that images keep their size (divided by the
            stride), an odd row or column below and right, or above and left.
        activation: "RELU", or "NOTSET" or None for none.
        pool: a `MaxPool2d` to apply to the result.

    Attributes:
        W: [nb_kernels, C / group, kh, kw].
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
        padding: Size | None = 0,
        dilation: Size = 1,
        group: int = 1,
        bias: bool = True,
        pad_mode: str = "NOTSET",
        activation: str | None = None,
        pool: MaxPool2d | None = None,
    ) -> None:
        self.in_channels: int | None = None
        if args:
            if isinstance(kernel_size, (list, tuple)) or len(args) > 3:
                raise UsageError(
                    "Conv2d takes (nb_kernels, kernel_size) or (in_channels, nb_kernels, kernel_size, ...)"
                )
            self.in_channels = check_integer("in_channels", nb_kernels, 1)
            nb_kernels, kernel_size = check_integer("nb_kernels", kernel_size, 1), args[0]
            stride = args[1] if len(args) > 1 else stride
            padding = args[2] if len(args) > 2 else padding
        super().__init__(kernel_size, stride, padding, pad_mode)
        self.nb_kernels, self.group = check_integer("nb_kernels", nb_kernels, 1), check_integer("group", group, 1)
        if self.nb_kernels % self.group:
            raise UsageError(f"{nb_kernels} kernels cannot be divided into {group} groups")
        if _pair("dilation", dilation) != (1, 1):
            raise UsageError("Conv2d has no dilation, as in SINGA; leave it at 1, and take a larger kernel_size")
        if pool is not None and not isinstance(pool, MaxPool2d):
            raise UsageError(f"Conv2d pools by a MaxPool2d layer; got {pool!r}")
        if pool is not None and (group > 1 or pool.pad_mode != "NOTSET" or len(pool.padding) > 2):
            raise UsageError("Conv2d pools in one group and with even padding only; call the pooling layer by itself")
        self.bias, self.relu, self.pool = bias, has_relu(activation), pool

    def initialize(self, x: Tensor) -> None:  # noqa: D102
        self.in_channels = self._channels(x, self.in_channels)
        if self.in_channels % self.group:
            raise ShapeError(f"{self._label}: {self.in_channels} channels cannot be divided into {self.group} groups")
        shape = self.nb_kernels, self.in_channels // self.group, *self.kernel_size
        self.W = self._parameter("W", shape, x)
        # SINGA's choice, which makes accuracies comparable.
        self.W.gaussian(0.0, sqrt(2 / (prod(shape[1:]) + self.nb_kernels)))
        if self.bias:
            self.b = self._parameter("b", (self.nb_kernels,), x)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        assert self.in_channels is not None
        self._check_images(x, self.in_channels, self.W)
        inputs = (x, self.W, self.b) if self.bias else (x, self.W)
        return self._run(self._operation(x), *inputs)

    def _operation(self, x: Tensor) -> Operation:
        settings = self.stride, self._padding_of(x), self.relu
        if self.group == 1:
            pool = self.pool
            window = None if pool is None else (pool.kernel_size, pool.stride, pool.padding)
            return operations.Conv2d(*settings, window)
        if self.group == self.in_channels == self.nb_kernels:
            return operations.DepthwiseConv2d(*settings)
        return operations.GroupedConv2d(self.group, *settings)


class SeparableConv2d(TensorLayer):
    """A convolution of each channel by itself, then one with 1x1 kernels (Chollet, arXiv 1610.02357).

    Takes its arguments in either form of `Conv2d`.

    Attributes:
        depthwise_conv: the first, a `Conv2d` in groups of one channel; made for the first input.
        point_conv: the second.
    """

    depthwise_conv: Conv2d
    point_conv: Conv2d

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
        self.in_channels, self.nb_kernels, self.bias = whole.in_channels, whole.nb_kernels, bias
        self.window = whole.kernel_size, whole.stride, whole.padding

    def initialize(self, x: Tensor) -> None:  # noqa: D102
        channels = self._channels(x, self.in_channels)
        self.depthwise_conv = Conv2d(channels, channels, *self.window, group=channels, bias=self.bias)
        self.point_conv = Conv2d(self.nb_kernels, 1, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y: Tensor = self.point_conv(self.depthwise_conv(x))
        return y


class Pooling2d(_Windowed):
    """The maximum, or the mean, of each window of images [N, C, H, W].

    Args:
        kernel_size: one integer or two, height and width of a window.
        stride: from one window to the next (default: the window's size).
        padding: around the images, as of `Conv2d`: never the maximum, and zeros in a mean.
        is_max: whether to take the maximum.
        pad_mode: as of `Conv2d`.
    """

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size | None = 0,
        is_max: bool = True,
        pad_mode: str = "NOTSET",
    ) -> None:
        super().__init__(kernel_size, kernel_size if stride is None else stride, padding, pad_mode)
        self.is_max = is_max

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        operation = operations.MaxPool2d if self.is_max else operations.AvgPool2d
        return self._run(operation(self.kernel_size, self.stride, self._padding_of(x)), x)


class MaxPool2d(Pooling2d):
    """The maximum of each window of images [N, C, H, W]; see `Pooling2d`."""

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size | None = 0, pad_mode: str = "NOTSET"
    ) -> None:
        super().__init__(kernel_size, stride, padding, True, pad_mode)


class AvgPool2d(Pooling2d):
    """The mean of each window of images [N, C, H, W], with padding counted as zeros; see `Pooling2d`."""

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size | None = 0, pad_mode: str = "NOTSET"
    ) -> None:
        super().__init__(kernel_size, stride, padding, False, pad_mode)


class MaxPool1d(Pooling2d):
    """The maximum of each window of sequences [N, C, 1, L], `kernel_size` elements long; see `Pooling2d`."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(*_in_a_row(kernel_size, stride, padding), True, pad_mode)


class AvgPool1d(Pooling2d):
    """The mean of each window of sequences [N, C, 1, L], `kernel_size` elements long; see `Pooling2d`."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(*_in_a_row(kernel_size, stride, padding), False, pad_mode)


def _in_a_row(kernel_size: int, stride: int | None, padding: int) -> tuple[Pair, Pair, Pair]:
    return (1, kernel_size), (1, kernel_size if stride is None else stride), (0, padding)


class BatchNorm2d(TensorLayer):
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
        if checked("momentum", momentum) > 1:
            raise UsageError(f"momentum {momentum} is not in [0, 1]")
        self.channels = None if channels is None else check_integer("channels", channels, 1)
        self.momentum, self.eps = momentum, eps

    def initialize(self, x: Tensor) -> None:  # noqa: D102
        self.channels = self._channels(x, self.channels)
        self.scale, self.bias = (self._parameter(key, (self.channels,), x) for key in ("scale", "bias"))
        self.scale.set_value(1)
        self.running_mean = Tensor((self.channels,), x.device, self.scale.dtype)
        self.running_var = Tensor((self.channels,), x.device, self.scale.dtype)
        self.running_var.set_value(1)

    def own_states(self) -> dict[str, Tensor]:  # noqa: D102
        return {"running_mean": self.running_mean, "running_var": self.running_var} if self._initialized else {}

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        assert self.channels is not None
        self._check_images(x, self.channels, self.scale)
        return self._run(self._operation(x), x, self.scale, self.bias)

    def _operation(self, x: Tensor) -> operations.BatchNorm2d:
        running = self.running_mean.array, self.running_var.array
        return operations.BatchNorm2d(*running, 1 - self.momentum, self.eps)


class SyncBatchNorm2d(BatchNorm2d):
    """`BatchNorm2d` by the statistics of all ranks' images, as if they were one batch; for small batches.

    All values count equally, for any sizes of the ranks' batches. Running statistics are the same on all ranks,
    bit for bit. In training mode, each forward and each backward pass is collective and waits for one small sum; so all
    ranks run the same number of passes, inside `no_sync` too. In evaluation mode it is local. A recorded step repeats
    the sums; a CUDA graph cannot hold them, so such a step runs unrecorded.

    Args:
        channels: see `BatchNorm2d`, as are the next two.
        momentum: see there.
        eps: see there.
        reduce: sums over ranks, for example a DistOpt's `reduce` (default: that of the model's optimizer; without one,
            or if that optimizer has none, statistics are those of this rank).
    """

    def __init__(
        self,
        channels: int | None = None,
        momentum: float = 0.9,
        eps: float = 1e-5,
        reduce: operations.Reduce | None = None,
    ) -> None:
        super().__init__(channels, momentum, eps)
        self.reduce, self._is_given = reduce, reduce is not None

    def take(self, reduce: operations.Reduce | None) -> None:
        """Local. Sum by the `reduce` of the model's optimizer, unless the constructor was given another."""
        if not self._is_given:
            self.reduce = reduce

    def _operation(self, x: Tensor) -> operations.BatchNorm2d:
        if self.reduce is None or not mode.training:
            return super()._operation(x)
        if x.device.recording:
            raise UsageError(f"{self._label} sums over ranks, which a CUDA graph cannot hold")
        running = self.running_mean.array, self.running_var.array
        return operations.SyncBatchNorm2d(*running, 1 - self.momentum, self.eps, self.reduce)
