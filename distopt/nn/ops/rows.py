"""Operations on rows [N, features] besides those with kernels: bias, product, similarity, and losses of SINGA's.

Losses are arrays of shape (1,). Targets have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ShapeError
from ...kernels import array_module
from ..core.arithmetic import Broadcast
from ..core.array import Array, settled
from ..core.operation import Operation


class AddBias(Broadcast):
    """x [N, M] with b added to each row (axis 0, b [M]) or column (axis 1, b [N])."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def value(self, x: Array, b: Array) -> Array:
        return x + (b[:, None] if self.axis else b)

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        return dy, dy.sum(axis=self.axis) if self.needs[1] else None


class Gemm(Broadcast):
    """alpha * A B + beta * C, where A [N, K] and B [K, M] may be given transposed, and C is broadcast to [N, M]."""

    reads = True

    def __init__(self, alpha: float, beta: float, trans_a: bool, trans_b: bool) -> None:
        self.alpha, self.beta, self.trans_a, self.trans_b = alpha, beta, trans_a, trans_b

    def _plain(self, a: Array, b: Array) -> tuple[Array, Array]:
        return a.T if self.trans_a else a, b.T if self.trans_b else b

    def value(self, a: Array, b: Array, c: Array | None = None) -> Array:
        x, w = self._plain(a, b)
        if not x.ndim == w.ndim == 2 or x.shape[1] != w.shape[0]:
            raise ShapeError(f"shapes {x.shape} and {w.shape} have no matrix product; [n, k] @ [k, m] has")
        y = self.alpha * (x @ w)
        if c is None:
            return y
        if (total := y + self.beta * c).shape != y.shape:
            raise ShapeError(
                f"C of shape {c.shape} is not added to a product of shape {y.shape}: it must not enlarge it"
            )
        return total

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        a, b, *c = self.saved
        x, w = self._plain(a, b)
        dc = [self.reduced(self.beta * dy, 2) if self.needs[2] else None] if c else []
        dy *= self.alpha
        da = (w @ dy.T if self.trans_a else dy @ w.T) if self.needs[0] else None
        return da, (dy.T @ x if self.trans_b else x.T @ dy) if self.needs[1] else None, *dc


class CosSim(Operation):
    """The cosine of the angle between each row of a [N, M] and that of b [N, M]: [N]."""

    def forward(self, a: Array, b: Array) -> Array:
        xp = array_module(a)
        lengths = [xp.sqrt(xp.square(x).sum(axis=1, keepdims=True)) for x in (a, b)]
        y = (a * b).sum(axis=1, keepdims=True) / (lengths[0] * lengths[1])
        self.saved = a, b, *lengths, y
        return y.reshape(-1)

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        a, b, length_a, length_b, y = self.saved
        dy = dy.reshape(-1, 1)
        da = dy * (b / length_b - y * a / length_a) / length_a if self.needs[0] else None
        return da, dy * (a / length_a - y * b / length_b) / length_b if self.needs[1] else None


class _Loss(Operation):
    """The sum of a term for each element of x, divided by the length of the batch."""

    own_type = True

    def terms(self, x: Array, t: Array) -> Array:
        raise NotImplementedError

    def slope(self, x: Array, t: Array) -> Array:
        """The derivative of `terms` in x."""
        raise NotImplementedError

    def forward(self, x: Array, t: Array) -> Array:
        if x.shape != t.shape:
            raise ShapeError(f"{type(self).__name__} needs equal shapes, got {x.shape} and {t.shape}")
        self.saved = x, array_module(x).asarray(t, x.dtype)
        return settled(self.terms(*self.saved).sum() / max(len(x), 1), x).reshape(1)

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        x, t = self.saved
        dy /= max(len(x), 1)
        return self.slope(x, t) * dy, None


class CrossEntropy(_Loss):
    """-t log(x), summed over x [N, ...], and divided by N."""

    def terms(self, x: Array, t: Array) -> Array:
        return -t * array_module(x).log(x)

    def slope(self, x: Array, t: Array) -> Array:
        return -t / x


class BinaryCrossEntropy(_Loss):
    """-t log(x + e) - (1 - t) log(1 - x + e), where e is 0.0001, summed over x [N, ...], and divided by N."""

    margin = 1e-4  # SINGA's

    def terms(self, x: Array, t: Array) -> Array:
        log = array_module(x).log
        return (t - 1) * log(1 + self.margin - x) - t * log(x + self.margin)

    def slope(self, x: Array, t: Array) -> Array:
        return (1 - t) / (1 + self.margin - x) - t / (x + self.margin)


class RankingLoss(Operation):
    """max(0, margin - positive + negative), summed over the pairs, and divided by the length of the batch."""

    own_type = True

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def forward(self, positive: Array, negative: Array) -> Array:
        if positive.shape != negative.shape:
            raise ShapeError(f"RankingLoss needs equal shapes, got {positive.shape} and {negative.shape}")
        excess = negative - positive + self.margin
        self.saved = excess > 0
        n = max(len(positive), 1)
        return settled((excess * self.saved).sum() / n, positive).reshape(1)

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        dy /= max(len(self.saved), 1)
        return -dy * self.saved, dy * self.saved
