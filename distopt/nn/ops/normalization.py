"""Batch normalization of images [N, C, H, W], by the batch of this rank or of all ranks."""

from __future__ import annotations

from typing import Protocol

from ..core.array import Array
from ..core.mode import mode
from ..core.operation import Arrays
from ..numerics import numerics_of
from .weighted import Weighted


class BatchNorm2d(Weighted):
    """Each channel of x [N, C, H, W] normalized, scaled by gamma [C], and shifted by beta [C].

    Args:
        running_mean: [C]; updated in place during training, used otherwise.
        running_var: [C]; the same.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
    """

    def __init__(self, running_mean: Array, running_var: Array, momentum: float, eps: float) -> None:
        self.running = running_mean, running_var
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Array, gamma: Array, beta: Array) -> Array:
        y, self.saved = numerics_of(x).batch_norm2d(
            x, gamma, beta, *self.running, self.momentum, self.eps, mode.training
        )
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dgamma, dbeta = self.gradient_memory(into, at_once=True)
        return numerics_of(dy).batch_norm2d_backward(dy, self.saved, dgamma, dbeta), dgamma, dbeta


class Reduce(Protocol):
    """Replaces a contiguous array of float64, in place, by its sum over all ranks. Collective."""

    def __call__(self, array: Array, /) -> object: ...


class Running(Protocol):
    """Running statistics of a layer, which an optimizer may update at the end of a step."""

    def note(self) -> tuple[Array, Array]:
        """Local. The arrays that a batch updates: mean and variance, or zeros that the optimizer adds to them later."""


class SyncBatchNorm2d(BatchNorm2d):
    """`BatchNorm2d` in training, by the statistics of all ranks; the gradients of gamma and beta are this rank's share.

    Both passes sum an array over the ranks, and are collective.

    Args:
        running_mean: see `BatchNorm2d`.
        running_var: see `BatchNorm2d`.
        momentum: see `BatchNorm2d`.
        eps: see `BatchNorm2d`.
        reduce: sums an array over the ranks.
    """

    def __init__(self, running_mean: Array, running_var: Array, momentum: float, eps: float, reduce: Reduce) -> None:
        super().__init__(running_mean, running_var, momentum, eps)
        self.reduce = reduce

    def forward(self, x: Array, gamma: Array, beta: Array) -> Array:
        kernels = numerics_of(x)
        sums = kernels.channel_sums(x)
        self.reduce(sums)
        (running_mean, running_var), channels = self.running, len(gamma)
        count, wide = sums[-1], sums[:channels] / sums[-1]
        mean = wide.astype(running_mean.dtype)
        var = (sums[channels:-1] / count - wide * wide).clip(0).astype(running_var.dtype)  # biased
        running_mean += self.momentum * (mean - running_mean)
        running_var += self.momentum * (var * (count / (count - 1).clip(1)) - running_var)
        y, saved = kernels.batch_norm2d(x, gamma, beta, mean, var, 0.0, self.eps, False)
        self.saved = saved, mean, var, sums
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        saved, mean, var, sums = self.saved
        kernels = numerics_of(dy)
        dgamma, dbeta = self.gradient_memory(into, at_once=True)
        dx = kernels.batch_norm2d_backward(dy, saved, dgamma, dbeta)  # as if mean and variance were constants
        if not self.needs[0]:
            return None, dgamma, dbeta
        totals = kernels.empty((2, len(mean)), "float64")
        totals[0], totals[1] = dgamma, dbeta
        totals *= saved.gamma  # before the sum: between partial updates the ranks have different gammas
        self.reduce(totals)
        # Mean and variance depend on every x, which adds an affine function of the normalized x to the gradient.
        slope, shift = (saved.inverse_deviation / -sums[-1] * totals).astype(mean.dtype)
        more, _ = kernels.batch_norm2d(saved.x, slope, shift, mean, var, 0.0, self.eps, False)
        dx += more
        return dx, dgamma, dbeta
