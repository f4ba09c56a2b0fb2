"""Batch normalization of images [N, C, H, W], by the batch of this rank or of all ranks."""

from __future__ import annotations

from typing import Any, Protocol

from ..core.array import Array
from ..core.mode import mode
from ..core.operation import Arrays
from ..numerics import numerics_of
from .weighted import Weighted


class BatchNorm2d(Weighted):
    """Each channel of x [N, C, H, W] normalized, scaled by gamma [C], and shifted by beta [C]; plus another array.

    The inputs are x, gamma, beta and, optionally, what is added, of the shape of x.

    Args:
        running_mean: [C]; updated in place during training, used otherwise.
        running_var: [C]; the same.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        relu: whether to apply ReLU in the end.
    """

    def __init__(
        self, running_mean: Array, running_var: Array, momentum: float, eps: float, relu: bool = False
    ) -> None:
        self.running = running_mean, running_var
        self.momentum, self.eps, self.relu = momentum, eps, relu

    def forward(self, x: Array, gamma: Array, beta: Array, plus: Array | None = None) -> Array:
        y, saved = self._normalized(x, gamma, beta, plus)
        self.saved = saved, y if self.relu and plus is not None else None
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        saved, y = self.saved
        if y is not None:
            dy = numerics_of(dy).relu_backward(dy, y)
        dgamma, dbeta = self.gradient_memory(into[:3], at_once=True)
        return (self._backward(dy, saved, dgamma, dbeta), dgamma, dbeta, dy)[: len(into)]

    def _normalized(self, x: Array, gamma: Array, beta: Array, plus: Array | None) -> tuple[Array, Any]:
        options = self.momentum, self.eps, mode.training, self.relu, plus
        result: tuple[Array, Any] = numerics_of(x).batch_norm2d(x, gamma, beta, *self.running, *options)
        return result

    def _backward(self, dy: Array, saved: Any, dgamma: Array, dbeta: Array) -> Array | None:
        """The gradient of x, without that of ReLU behind a sum; overwrites dgamma and dbeta."""
        return numerics_of(dy).batch_norm2d_backward(dy, saved, dgamma, dbeta)


class Reduce(Protocol):
    """Replaces a contiguous array of float64, in place, by its sum over all ranks. Collective."""

    def __call__(self, array: Array, /) -> object: ...


class Running(Protocol):
    """Running statistics of a layer, which an optimizer may update at the end of a step."""

    def note(self) -> tuple[Array, Array]:
        """The arrays that a batch updates: mean and variance, or zeros that the optimizer adds to them later."""


class SyncBatchNorm2d(BatchNorm2d):
    """`BatchNorm2d` in training, by the statistics of all ranks; the gradients of gamma and beta are this rank's share.

    Both passes sum an array over the ranks, and are collective.

    Args:
        running_mean: see `BatchNorm2d`.
        running_var: see `BatchNorm2d`.
        momentum: see `BatchNorm2d`.
        eps: see `BatchNorm2d`.
        relu: see `BatchNorm2d`.
        reduce: sums an array over the ranks.
    """

    def __init__(
        self, running_mean: Array, running_var: Array, momentum: float, eps: float, relu: bool, reduce: Reduce
    ) -> None:
        super().__init__(running_mean, running_var, momentum, eps, relu)
        self.reduce = reduce

    def _normalized(self, x: Array, gamma: Array, beta: Array, plus: Array | None) -> tuple[Array, Any]:
        kernels = numerics_of(x)
        sums = kernels.channel_sums(x)
        self.reduce(sums)
        (running_mean, running_var), channels = self.running, len(gamma)
        count, wide = sums[-1], sums[:channels] / sums[-1]
        mean = wide.astype(running_mean.dtype)
        var = (sums[channels:-1] / count - wide * wide).clip(0).astype(running_var.dtype)  # biased
        running_mean += self.momentum * (mean - running_mean)
        running_var += self.momentum * (var * (count / (count - 1).clip(1)) - running_var)
        y, saved = kernels.batch_norm2d(x, gamma, beta, mean, var, 0.0, self.eps, False, self.relu, plus)
        return y, (saved, mean, var, sums)

    def _backward(self, dy: Array, saved: Any, dgamma: Array, dbeta: Array) -> Array | None:
        saved, mean, var, sums = saved
        kernels = numerics_of(dy)
        dx: Array = kernels.batch_norm2d_backward(dy, saved, dgamma, dbeta)  # as if mean and variance were constants
        if not self.needs[0]:
            return None
        totals = kernels.empty((2, len(mean)), "float64")
        totals[0], totals[1] = dgamma, dbeta
        totals *= saved.gamma  # before the sum: between partial updates the ranks have different gammas
        self.reduce(totals)
        # Mean and variance depend on every x, which adds an affine function of the normalized x to the gradient.
        slope, shift = (saved.inverse_deviation / -sums[-1] * totals).astype(mean.dtype)
        more, _ = kernels.batch_norm2d(saved.x, slope, shift, mean, var, 0.0, self.eps, False)
        dx += more
        return dx
