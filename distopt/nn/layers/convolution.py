"""Layers that convolve images [N, C, H, W]."""

from __future__ import annotations

from math import prod, sqrt

from ...checks import check_integer
from ...errors import ShapeError, UsageError
from ..core.tensor import Tensor
from ..ops import convolution
from .base import TensorLayer, has_relu
from .pooling import MaxPool2d
from .windowed import Size, Windowed, pair

__all__ = [
    "Conv2d",
    "SeparableConv2d",
]


class Conv2d(Windowed):
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
            stride). An odd row or column comes below or right (UPPER), or above or left (LOWER).
        activation: "RELU", or "NOTSET" or None for none.
        pool: a `MaxPool2d` to apply to the result.

    Attributes:
        W: [nb_kernels, C / group, kh, kw].
        b: [nb_kernels]; None without `bias`.
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
        if pair("dilation", dilation) != (1, 1):
            raise UsageError("Conv2d has no dilation, as in SINGA; leave it at 1, and take a larger kernel_size")
        if pool is not None and not isinstance(pool, MaxPool2d):
            raise UsageError(f"Conv2d pools by a MaxPool2d layer; got {pool!r}")
        if pool is not None and (pool.pad_mode != "NOTSET" or len(pool.padding) > 2):
            raise UsageError("Conv2d pools with even padding only; call the pooling layer by itself")
        self.bias, self.relu, self.pool = bias, has_relu(activation), pool

    def initialize(self, x: Tensor) -> None:
        """Create `W`, of normal random numbers, and `b`, of zeros, for images like `x`."""
        self.in_channels = self._channels(x, self.in_channels)
        if self.in_channels % self.group:
            raise ShapeError(f"{self._label}: {self.in_channels} channels cannot be divided into {self.group} groups")
        shape = self.nb_kernels, self.in_channels // self.group, *self.kernel_size
        self.W = self._parameter("W", shape, x)
        # SINGA's choice, which makes accuracies comparable.
        self.W.gaussian(0.0, sqrt(2 / (prod(shape[1:]) + self.nb_kernels)))
        self.b = self._parameter("b", (self.nb_kernels,), x) if self.bias else None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """The images [N, nb_kernels, oh, ow], where oh = (H + top + bottom - kh) // stride + 1, or these pooled.

        Raises:
            ShapeError: `x` has another number of channels than before, or is smaller than a kernel.
            UsageError: `x` is neither of the type of the parameters nor float16.
        """
        assert self.in_channels is not None
        self._check_images(x, self.in_channels, self.W)
        pool = self.pool
        window = None if pool is None else (pool.kernel_size, pool.stride, pool.padding)
        operation = convolution.Conv2d(self.stride, self._padding_of(x), self.relu, window)
        return self._run(operation, x, self.W, self.b) if self.bias else self._run(operation, x, self.W)


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

    def initialize(self, x: Tensor) -> None:
        """Create both convolutions, for images like `x`."""
        channels = self._channels(x, self.in_channels)
        self.depthwise_conv = Conv2d(channels, channels, *self.window, group=channels, bias=self.bias)
        self.point_conv = Conv2d(self.nb_kernels, 1, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The images [N, nb_kernels, oh, ow], as of a `Conv2d` with these arguments."""
        y: Tensor = self.point_conv(self.depthwise_conv(x))
        return y
