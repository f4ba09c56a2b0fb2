"""Layers that multiply rows [N, inputs] by a weight."""

from __future__ import annotations

from collections.abc import Sequence

from ...checks import check_integer
from ...errors import ShapeError, UsageError
from ..core.tensor import Tensor
from ..ops import matrix
from . import initializer
from .base import TensorLayer, has_relu

__all__ = [
    "Gemm",
    "Linear",
]


class Linear(TensorLayer):
    """x [N, in] @ W + b, optionally with ReLU.

    `Linear(out_features)` takes the number of inputs from the first input; `Linear(in_features, out_features)`
    checks it. As in SINGA, `bias` may be a third positional argument.

    Attributes:
        W: [in, out].
        b: [out]; None without `bias`.
    """

    W: Tensor
    b: Tensor

    def __init__(self, out_features: int, *args: int, bias: bool = True, activation: str | None = None) -> None:
        if len(args) == 2 and isinstance(args[1], bool):
            bias = args[1]
        elif len(args) > 1:
            raise UsageError("Linear takes (out_features) or (in_features, out_features), and then bias")
        self.in_features = check_integer("in_features", out_features, 1) if args else None
        self.out_features = check_integer("out_features", args[0] if args else out_features, 1)
        self.bias, self.relu = bias, has_relu(activation)

    def initialize(self, x: Tensor) -> None:
        """Create `W`, by `initializer.glorot_normal`, and `b`, of zeros, for rows like those of `x`."""
        if self.in_features is None:
            self._check_matrix(x)
            self.in_features = x.shape[1]
        self.W = self._parameter("W", (self.in_features, self.out_features), x)
        initializer.glorot_normal(self.W)
        # None as in SINGA, whose scripts look for it.
        self.b = self._parameter("b", (self.out_features,), x) if self.bias else None  # type: ignore[assignment]

    def _check_matrix(self, x: Tensor) -> None:
        if len(x.shape) != 2:
            raise ShapeError(f"{self._label} expects rows [N, inputs], got {list(x.shape)}; put a Flatten before it")

    def forward(self, x: Tensor) -> Tensor:
        """Rows [N, out_features].

        Raises:
            ShapeError: `x` has not two dimensions, or another number of columns than before.
            UsageError: `x` is neither of the type of the parameters nor float16.
        """
        self._check_matrix(x)
        if x.shape[1] != self.in_features:
            raise ShapeError(f"{self._label} expects {self.in_features} inputs, got {x.shape[1]}")
        self._check_dtype(x, self.W)
        operation = matrix.Linear(self.relu)
        return operation(x, self.W, self.b) if self.bias else operation(x, self.W)


class Gemm(TensorLayer):
    """alpha A' W' + beta b, where A' and W' are the input A and the weight, transposed on request.

    Args:
        nb_kernels: columns of the result.
        alpha: factor of the product.
        beta: factor of the bias.
        transA: A is [inputs, N]; else [N, inputs].
        transB: W is [nb_kernels, inputs]; else [inputs, nb_kernels].
        bias: whether to add a bias.
        bias_shape: its shape, which is broadcast to [N, nb_kernels] (default: [1, nb_kernels]).

    Attributes:
        W: see `transB`.
        b: see `bias_shape`; None without `bias`.
    """

    W: Tensor
    b: Tensor

    def __init__(
        self,
        nb_kernels: int,
        alpha: float = 1.0,
        beta: float = 1.0,
        transA: bool = False,
        transB: bool = True,
        bias: bool = True,
        bias_shape: Sequence[int] | None = None,
    ) -> None:
        self.nb_kernels = check_integer("nb_kernels", nb_kernels, 1)
        self.alpha, self.beta, self.transA, self.transB = alpha, beta, transA, transB
        self.bias, self.bias_shape = bias, (1, nb_kernels) if bias_shape is None else tuple(bias_shape)

    def initialize(self, x: Tensor) -> None:
        """Create `W`, by `initializer.glorot_normal`, and `b`, of zeros, for a matrix like `x`."""
        inputs = self._inputs(x)
        self.W = self._parameter("W", (self.nb_kernels, inputs) if self.transB else (inputs, self.nb_kernels), x)
        initializer.glorot_normal(self.W)
        self.b = self._parameter("b", self.bias_shape, x) if self.bias else None  # type: ignore[assignment]

    def _inputs(self, x: Tensor) -> int:
        if len(x.shape) != 2:
            raise ShapeError(f"{self._label} expects a matrix, got {list(x.shape)}; put a Flatten before it")
        return x.shape[0 if self.transA else 1]

    def forward(self, x: Tensor) -> Tensor:
        """A matrix [N, nb_kernels]. Raises as `Linear.forward`."""
        inputs = self.W.shape[1 if self.transB else 0]
        if self._inputs(x) != inputs:
            raise ShapeError(f"{self._label} expects {inputs} inputs, got {self._inputs(x)}")
        self._check_dtype(x, self.W)
        return matrix.gemm(x, self.W, self.b, self.alpha, self.beta, self.transA, self.transB)
