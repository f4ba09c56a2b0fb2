"""SINGA's `tensor` module: tensors, and functions of their values.

The functions compute outside the graph: a backward pass does not go through them, as it does through those of
`autograd` and Python's operators. Exceptions are `add`, `sub`, `eltwise_mult`, `div` and `reshape`. They take tensors
on one device, broadcast as NumPy does, and return new tensors, in the type of those of their arguments that are float;
from integers alone they compute integers, or else float32. They raise a `UsageError` for arguments that do not fit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..checks import explain_absent
from ..errors import UsageError
from ..nn.core.array import float16, float32, float64, int32, int64
from ..nn.core.operation import named
from ..nn.core.tensor import Tensor, from_raw_tensor
from ..nn.devices.device import Device, device_of

# fmt: off
__all__ = [
    "PlaceHolder", "Tensor", "abs", "add", "add_column", "add_row", "average", "axpy", "bernoulli", "ceil",
    "concatenate", "contiguous", "copy_data_to_from", "copy_from_numpy", "div", "einsum", "eltwise_mult", "eq",
    "exp", "float16", "float32", "float64", "from_numpy", "from_raw_tensor", "from_raw_tensors", "gaussian", "ge",
    "gt", "int32", "int64", "le", "log", "lt", "mult", "ones", "ones_like", "pow", "product", "random", "repeat",
    "reshape", "sigmoid", "sign", "sizeof", "softmax", "sqrt", "square", "sub", "sum", "sum_columns", "sum_rows",
    "tanh", "tensordot", "to_host", "to_numpy", "transpose", "uniform", "zeros", "zeros_like",
]
# fmt: on

PlaceHolder = Tensor


# -- new tensors -------------------------------------------------------------------------------------------------------
def from_numpy(array: np.ndarray[Any, Any], device: Device | None = None, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor with a copy of `array`, in `dtype` (default: its own, with 64-bit types made 32-bit, as in SINGA)."""
    # Without data, Tensor would make zeros; an array of None is refused by its type.
    return Tensor(data=np.asarray(None) if array is None else array, device=device, dtype=dtype)


def from_raw_tensors(raws: Iterable[Any]) -> list[Tensor]:
    """`from_raw_tensor` of each."""
    return [from_raw_tensor(raw) for raw in raws]


def to_numpy(values: Any) -> np.ndarray[Any, Any]:
    """A copy of a tensor, raw tensor, array or plain number, as a NumPy array; a number gives [1]."""
    if isinstance(values, Tensor):
        return values.to_numpy()
    return np.array(device_of(values).host(values), ndmin=1)


def zeros(shape: Sequence[int], device: Device | None = None) -> Tensor:
    """A tensor of zeros, float32."""
    return Tensor(shape, device)


def ones(shape: Sequence[int], device: Device | None = None) -> Tensor:
    """A tensor of ones, float32."""
    return Tensor(shape, device).set_value(1)


def random(shape: Sequence[int], device: Device | None = None) -> Tensor:
    """A tensor of random numbers in [0, 1), float32, from the device's `host_rng`."""
    return Tensor(shape, device).uniform(0, 1)


def zeros_like(t: Tensor) -> Tensor:
    """Zeros of the shape, dtype and device of `t`."""
    return Tensor(t.shape, t.device, t.dtype)


def ones_like(t: Tensor) -> Tensor:
    """A tensor of ones, with the shape, dtype and device of `t`."""
    return zeros_like(t).set_value(1)


def to_host(t: Tensor) -> Tensor:
    """A copy on the CPU."""
    return Tensor.of(t.to_numpy())


contiguous, reshape, transpose, repeat = Tensor.clone, Tensor.reshape, Tensor.transpose, Tensor.repeat


def concatenate(tensors: Iterable[Tensor], axis: int) -> Tensor:
    """The tensors joined along `axis`; their other dimensions are equal."""
    if not (parts := list(tensors)):
        raise UsageError("concatenate needs at least one tensor")
    return parts[0].compute("concatenate", parts, axis=axis)


# -- overwriting -------------------------------------------------------------------------------------------------------
def bernoulli(p: float, t: Tensor) -> Tensor:
    """`Tensor.bernoulli`."""
    return t.bernoulli(p)


def gaussian(mean: float, std: float, t: Tensor) -> Tensor:
    """`Tensor.gaussian`."""
    return t.gaussian(mean, std)


def uniform(low: float, high: float, t: Tensor) -> Tensor:
    """`Tensor.uniform`."""
    return t.uniform(low, high)


def copy_from_numpy(raw: Any, array: np.ndarray[Any, Any]) -> None:
    """Overwrite a raw tensor with the values of `array`, of the same size."""
    from_raw_tensor(raw).copy_from_numpy(array)


def copy_data_to_from(dst: Tensor, src: Tensor, size: int, dst_offset: int = 0, src_offset: int = 0) -> None:
    """Copy `size` elements of `src`, from number `src_offset` on, to `dst`, from number `dst_offset` on.

    Raises:
        UsageError: there are fewer elements.
    """
    if min(size, dst_offset, src_offset) < 0 or dst_offset + size > dst.size() or src_offset + size > src.size():
        raise UsageError(
            f"{size} elements from {src_offset} on of {src.size()} do not fit over those from {dst_offset} on of "
            f"{dst.size()}"
        )
    part = src.array.reshape(-1)[src_offset : src_offset + size]
    if src.device is not dst.device:
        part = dst.device.xp.asarray(src.device.host(part))
    dst.changed().array.reshape(-1)[dst_offset : dst_offset + size] = part


# -- functions of each element -----------------------------------------------------------------------------------------
def _of_each(name: str) -> Callable[[Tensor], Tensor]:
    def function(t: Tensor) -> Tensor:
        return t.compute(name, t)

    return named(function, name, f"`numpy.{name}` of each element.")


abs = _of_each("abs")  # noqa: A001 - here and below SINGA's names
ceil = _of_each("ceil")
exp = _of_each("exp")
log = _of_each("log")
sign = _of_each("sign")
sqrt = _of_each("sqrt")
square = _of_each("square")
tanh = _of_each("tanh")

lt, le, gt, ge, eq = operator.lt, operator.le, operator.gt, operator.ge, operator.eq


def sigmoid(t: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of each element x, as (1 + tanh(x / 2)) / 2, which does not overflow."""
    y = tanh(t.compute("multiply", t, 0.5))
    y.array += 1
    y.array *= 0.5
    return y


def softmax(t: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(x) divided by its sum over the last dimension, for each element x."""
    y = exp(t.compute("subtract", t, t.compute("max", t, axis=-1, keepdims=True)))
    y.array /= y.array.sum(axis=-1, keepdims=True)
    return _stored(y, out)


# -- functions of two tensors ------------------------------------------------------------------------------------------
def _stored(result: Tensor, out: Tensor | None) -> Tensor:
    """`result`, or `out` with its values."""
    if out is None:
        return result
    if out.shape != result.shape:
        raise UsageError(f"the result has shape {result.shape}, the tensor that is to take it has {out.shape}")
    out.changed().array[...] = result.array
    return out


def _weighted(alpha: float, x: Tensor, beta: float, y: Tensor) -> Tensor:
    """The sum alpha * x + beta * y; like BLAS, without y if beta is 0, even if y contains NaN."""
    x = x.compute("multiply", x, alpha)
    return x if beta == 0 else x.compute("add", x, y.compute("multiply", y, beta))


def add(lhs: Tensor, rhs: Tensor | float, ret: Tensor | None = None) -> Tensor:
    """`lhs` + `rhs`, stored in `ret` if that is given; a part of the graph otherwise."""
    return _stored(lhs + rhs, ret)


def sub(lhs: Tensor, rhs: Tensor | float, ret: Tensor | None = None) -> Tensor:
    """As `add`, of the difference."""
    return _stored(lhs - rhs, ret)


def eltwise_mult(lhs: Tensor, rhs: Tensor | float, ret: Tensor | None = None) -> Tensor:
    """As `add`, of the product of each two elements."""
    return _stored(lhs * rhs, ret)


def div(lhs: Tensor, rhs: Tensor | float, ret: Tensor | None = None) -> Tensor:
    """As `add`, of the quotient of each two elements."""
    return _stored(lhs / rhs, ret)


def pow(t: Tensor, x: Tensor | float, out: Tensor | None = None) -> Tensor:  # noqa: A001
    """The power t ** x of each two elements."""
    return _stored(t.compute("power", t, t.operand(x)), out)


def axpy(alpha: float, x: Tensor, y: Tensor) -> Tensor:
    """Overwrite y with alpha * x + y; return it."""
    return _stored(_weighted(alpha, x, 1, y), y)


def add_column(alpha: float, v: Tensor, beta: float, M: Tensor) -> Tensor:
    """Overwrite each column m of M [rows, columns] with alpha * v + beta * m, v [rows]; return M."""
    return _stored(_weighted(alpha, v.reshape((-1, 1)), beta, M), M)


def add_row(alpha: float, v: Tensor, beta: float, M: Tensor) -> Tensor:
    """Overwrite each row m of M [rows, columns] with alpha * v + beta * m, v [columns]; return M."""
    return _stored(_weighted(alpha, v.reshape((1, -1)), beta, M), M)


def mult(A: Tensor, B: Tensor, C: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """The matrix product alpha * A @ B, of vectors, matrices or, in the last two dimensions, batches of matrices.

    With `C`, this is overwritten with alpha * A @ B + beta * C, and returned.
    """
    y = A.compute("matmul", A, B)
    return _weighted(alpha, y, 0, y) if C is None else _stored(_weighted(alpha, y, beta, C), C)


def einsum(ops: str, first: Tensor, *others: Tensor) -> Tensor:
    """Einstein's sum, for example "ij,jk->ik", as in `numpy.einsum`."""
    return first.compute("einsum", ops, first, *others)


def tensordot(A: Tensor, B: Tensor, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """Sum of products over `axes`, as in `numpy.tensordot`; of all axes, shape [1]."""
    return A.compute("tensordot", A, B, axes=axes)


# -- sums --------------------------------------------------------------------------------------------------------------
def sum(t: Tensor, axis: int | tuple[int, ...] | None = None, out: Tensor | None = None) -> Tensor:  # noqa: A001
    """Sum over `axis` (default: over all elements, shape [1])."""
    return _stored(t.compute("sum", t, axis=axis), out)


def average(t: Tensor, axis: int | None = None) -> Any:
    """Mean over `axis`, a tensor; without `axis` the mean of all elements, a number."""
    mean = t.compute("mean", t, axis=axis)
    return mean.item() if axis is None else mean


def sum_columns(M: Tensor) -> Tensor:
    """Sum of the columns of M [rows, columns]: [rows, 1]."""
    return M.compute("sum", _matrix(M), axis=1, keepdims=True)


def sum_rows(M: Tensor) -> Tensor:
    """Sum of the rows of M [rows, columns]: [1, columns]."""
    return M.compute("sum", _matrix(M), axis=0, keepdims=True)


def _matrix(M: Tensor) -> Tensor:
    if M.ndim() != 2:
        raise UsageError(f"a matrix [rows, columns] is needed, got a tensor of shape {M.shape}")
    return M


# -- sizes -------------------------------------------------------------------------------------------------------------
def product(shape: Iterable[int]) -> int:
    """Number of elements."""
    return math.prod(shape)


def sizeof(dtype: DTypeLike) -> int:
    """Bytes of an element."""
    return np.dtype(dtype).itemsize


explain_absent(globals(), __all__)
