"""Matrix products and other operations on rows [N, features]. Weights come after their inputs."""

from __future__ import annotations

from ...errors import ShapeError
from ...kernels import array_module
from ..core.arithmetic import Broadcast, MatMul
from ..core.array import Array, settled
from ..core.operation import Arrays, Operation
from ..core.tensor import Tensor
from ..numerics import numerics_of
from .weighted import Weighted

__all__ = [
    "add_bias",
    "cossim",
    "gemm",
    "matmul",
]


class Linear(Weighted):
    """x [N, in] @ w [in, out], plus b [out] if given, optionally with ReLU."""

    def __init__(self, relu: bool = False) -> None:
        self.relu = relu

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        y, self.saved = numerics_of(x).linear(x, w, b, self.relu)
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dw, *db = self.gradient_memory(into)
        dx = numerics_of(dy).linear_backward(dy, self.saved, dw, db[0] if db else None, self.needs[0])
        return dx, dw, *db


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a` [..., n, k] @ `b` [..., k, m]; the dimensions before the last two are broadcast."""
    return MatMul()(a, b)


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

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        a, b, *c = self.saved
        x, w = self._plain(a, b)
        dc = [self.reduced(self.beta * dy, 2) if self.needs[2] else None] if c else []
        dy *= self.alpha
        da = (w @ dy.T if self.trans_a else dy @ w.T) if self.needs[0] else None
        return da, (dy.T @ x if self.trans_b else x.T @ dy) if self.needs[1] else None, *dc


def gemm(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """`alpha` A' B' + `beta` C [N, M].

    Args:
        A: A' [N, K], or its transpose if `transA`.
        B: B' [K, M], or its transpose if `transB`.
        C: may be broadcast to [N, M]; by default 0.
        alpha: factor of the product.
        beta: factor of C.
        transA: see A.
        transB: see B.
    """
    operands: tuple[Tensor, ...] = (A, B) if C is None else (A, B, C)
    return Gemm(alpha, beta, bool(transA), bool(transB))(*operands)


class AddBias(Broadcast):
    """x [N, M] with b added to each row (axis 0, b [M]) or column (axis 1, b [N])."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def value(self, x: Array, b: Array) -> Array:
        return x + (b[:, None] if self.axis else b)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return dy, dy.sum(axis=self.axis) if self.needs[1] else None


def add_bias(x: Tensor, b: Tensor, axis: int = 0) -> Tensor:
    """`x` [N, M] with `b` [M] added to each row, or with `axis` 1, `b` [N] added to each column."""
    if axis not in (0, 1) or x.ndim() != 2 or b.shape != x.shape[1 - axis : 2 - axis]:
        raise ShapeError(
            f"add_bias takes x [N, M], and b [M] for axis 0, or b [N] for axis 1; got {x.shape}, {b.shape}, axis {axis}"
        )
    return AddBias(axis)(x, b)


class CosSim(Operation):
    """The cosines of the angles between the rows of a [N, M] and b [N, M]: [N]."""

    def forward(self, a: Array, b: Array) -> Array:
        xp = array_module(a)
        lengths = [xp.sqrt(xp.square(x).sum(axis=1, keepdims=True)) for x in (a, b)]
        y = settled((a * b).sum(axis=1, keepdims=True) / (lengths[0] * lengths[1]), a, b)
        self.saved = a, b, *lengths, y
        return y.reshape(-1)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        a, b, length_a, length_b, y = self.saved
        dy = dy.reshape(-1, 1)
        da = dy * (b / length_b - y * a / length_a) / length_a if self.needs[0] else None
        return da, dy * (a / length_a - y * b / length_b) / length_b if self.needs[1] else None


def cossim(a: Tensor, b: Tensor) -> Tensor:
    """The cosines of the angles between the rows of `a` [N, M] and `b` [N, M]: [N]."""
    if a.ndim() != 2 or a.shape != b.shape:
        raise ShapeError(f"cossim compares the rows of two tensors of one shape [N, M]; got {a.shape} and {b.shape}")
    return CosSim()(a, b)
