"""Batch normalization layers for images [N, C, H, W]."""

from __future__ import annotations

from typing import Any

from ...checks import check_integer, check_number
from ...errors import ShapeError, UsageError
from ..core.array import Array
from ..core.mode import mode
from ..core.tensor import Tensor
from ..ops import normalization
from .base import TensorLayer, has_relu

__all__ = [
    "BatchNorm2d",
    "SyncBatchNorm2d",
]


class BatchNorm2d(TensorLayer):
    """Batch normalization of images [N, C, H, W] per channel (Ioffe and Szegedy, arXiv 1502.03167).

    `BatchNorm2d(channels)` checks the number of channels; by default it comes from the first input.

    Args:
        momentum: weight of the old value in a running statistic (PyTorch's momentum is 1 minus this).
        eps: added to the variance.
        activation: "RELU" to apply ReLU in the end.

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

    def __init__(
        self, channels: int | None = None, momentum: float = 0.9, eps: float = 1e-5, *, activation: str | None = None
    ) -> None:
        self.relu = has_relu(activation)
        self.channels = None if channels is None else check_integer("channels", channels, 1)
        self.momentum, self.eps = check_number("momentum", momentum, "[0, 1]"), eps
        self.running: normalization.Running | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "running": None}  # of an optimizer, which a copy does not have

    def initialize(self, x: Tensor, plus: Tensor | None = None) -> None:
        """Create the parameters and the running statistics, for images like `x`."""
        self.channels = self._channels(x, self.channels)
        self.scale, self.bias = (self._parameter(key, (self.channels,), x) for key in ("scale", "bias"))
        self.scale.set_value(1)
        self.running_mean = Tensor((self.channels,), x.device, self.scale.dtype)
        self.running_var = Tensor((self.channels,), x.device, self.scale.dtype)
        self.running_var.set_value(1)

    def own_states(self) -> dict[str, Tensor]:
        """The running statistics, once the layer is initialized."""
        return {"running_mean": self.running_mean, "running_var": self.running_var} if self._initialized else {}

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """The images `x`, normalized by the batch in training mode and by the running statistics otherwise.

        Args:
            x: the images.
            plus: what is added before ReLU, of the shape of `x`, as where a residual block ends.

        Raises:
            ShapeError: `x` has another number of channels than before, or `plus` another shape.
            UsageError: `x` is neither of the type of the parameters nor float16, or has one value per channel to train.
        """
        assert self.channels is not None
        self._check_images(x, self.channels, self.scale)
        if plus is not None and plus.shape != x.shape:
            raise ShapeError(f"{self._label} adds an array of {list(plus.shape)} to images of {list(x.shape)}")
        more = () if plus is None else (plus,)
        return self._run(self._operation(x), x, self.scale, self.bias, *more)

    def _operation(self, x: Tensor) -> normalization.BatchNorm2d:
        running = self.arrays() if self.running is None or not mode.training else self.running.note()
        return normalization.BatchNorm2d(*running, 1 - self.momentum, self.eps, self.relu)

    def arrays(self) -> tuple[Array, Array]:
        """Running mean and variance, in place."""
        return self.running_mean.array, self.running_var.array

    def use_optimizer(self, optimizer: Any) -> None:
        """Let an optimizer with `add_statistics` update the running statistics at the end of a step."""
        add = getattr(optimizer, "add_statistics", None)
        self.running = None if add is None else add(self, self.arrays, 1 - self.momentum)


class SyncBatchNorm2d(BatchNorm2d):
    """`BatchNorm2d` by the statistics of all ranks' images, as if they were one batch; for small batches.

    All values count equally, for any sizes of the ranks' batches. Running statistics are the same on all ranks,
    bit for bit. In training mode, each forward and each backward pass is collective and waits for one small sum; so all
    ranks run the same number of passes, inside `no_sync` too. In evaluation mode it is local. A CUDA graph cannot hold
    the sums, so such a step runs without one.

    Args:
        channels: see `BatchNorm2d`.
        momentum: see `BatchNorm2d`.
        eps: see `BatchNorm2d`.
        reduce: sums an array over the ranks, such as a DistOpt's `reduce` (default: the `reduce` of the model's
            optimizer; if it has none, statistics are those of this rank).
        activation: see `BatchNorm2d`.
    """

    def __init__(
        self,
        channels: int | None = None,
        momentum: float = 0.9,
        eps: float = 1e-5,
        reduce: normalization.Reduce | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        super().__init__(channels, momentum, eps, activation=activation)
        self.reduce, self._is_given = reduce, reduce is not None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"reduce": self.reduce if self._is_given else None}

    def use_optimizer(self, optimizer: Any) -> None:
        """Sum statistics by the `reduce` of an optimizer, unless the constructor was given another."""
        if not self._is_given:
            self.reduce = getattr(optimizer, "reduce", None)

    def _operation(self, x: Tensor) -> normalization.BatchNorm2d:
        if self.reduce is None or not mode.training:
            return super()._operation(x)
        if x.device.capturing:
            raise UsageError(f"{self._label} sums over ranks, which a CUDA graph cannot hold")
        return normalization.SyncBatchNorm2d(*self.arrays(), 1 - self.momentum, self.eps, self.relu, self.reduce)
