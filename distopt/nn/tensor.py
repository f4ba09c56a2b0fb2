"""Tensors, and operations that compute tensors from tensors.

A `Tensor` is an array with the information that training needs. An `Operation` computes one tensor and, while
`mode.training` is on, stays attached to it as its `creator`. The tensors and creators behind a loss are the graph that
`distopt.nn.autograd` traverses. Arithmetic on tensors also uses operations, so it has gradients like any layer.
"""

from __future__ import annotations

import itertools
import operator
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from ..errors import UsageError
from ..kernels import array_module
from .device import Device, get_default_device
from .mode import Ran, mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike

__all__ = ["Operation", "Tensor", "float32", "float64", "from_numpy", "int32", "int64", "to_numpy"]

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray

float32 = np.float32
float64 = np.float64
int32 = np.int32
int64 = np.int64


class Tensor:
    """An array on a device.

    Args:
        shape: dimensions of a new tensor of zeros.
        device: device of the tensor (default: the CPU).
        dtype: element type.
        data: an array to use, without a copy, instead of a new one; overrides `shape` and `dtype`.
        requires_grad: accepted for SINGA's scripts. Only `stores_grad` determines which gradients are computed.
        stores_grad: whether this is a parameter: `autograd.backward` yields its gradient.
        name: name of a parameter, unique in its model, such as "conv1.W".

    Attributes:
        data: the array, C-contiguous. It may be changed in place.
        grad: the last gradient of a parameter. If set, `backward` writes into that tensor's memory.
        creator: the operation that computed this tensor; None for inputs and parameters.
    """

    __slots__ = ("__weakref__", "creator", "data", "device", "grad", "name", "requires_grad", "stores_grad")
    __array_ufunc__ = None  # makes NumPy scalars defer to this class in arithmetic

    def __init__(
        self,
        shape: Sequence[int] = (),
        device: Device | None = None,
        dtype: DTypeLike = float32,
        data: Array = None,
        requires_grad: bool = True,
        stores_grad: bool = False,
        name: str | None = None,
    ) -> None:
        self.device = get_default_device() if device is None else device
        if data is None:
            data = self.device.xp.zeros(tuple(shape), dtype)
        elif not data.flags.c_contiguous:
            raise UsageError("a tensor cannot use a strided array; pass a contiguous one (numpy.ascontiguousarray)")
        self.data: Array = data
        self.grad: Tensor | None = None
        self.creator: Operation | None = None
        self.requires_grad = requires_grad
        self.stores_grad = stores_grad
        self.name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""
        shape: tuple[int, ...] = self.data.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        dtype: np.dtype[Any] = self.data.dtype
        return dtype

    def __repr__(self) -> str:
        label = f"{self.name}, " if self.name else ""
        return f"Tensor({label}{list(self.shape)}, {self.dtype}, {self.device!r})"

    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def item(self) -> float:
        """The value of a tensor of one element. Waits for the device; raises the errors of `Device.check`."""
        value: float = self.data.item()
        self.device.check()
        return value

    # -- values ------------------------------------------------------------------------------------------------------
    def to_numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the values, as a NumPy array."""
        return np.array(self.device.host(self.data))

    def copy_from_numpy(self, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        """Overwrite the values with those of `array`, converted to this tensor's dtype.

        Args:
            array: any shape.
            offset: index of the first element to overwrite; 0 needs an array of the tensor's size.

        Raises:
            UsageError: the sizes do not fit.
        """
        array = np.asarray(array)
        if offset < 0 or array.size != self.size() - offset:
            raise UsageError(
                f"an array of shape {array.shape} does not fill a tensor of shape {self.shape} from element {offset}"
            )
        source = self.device.xp.asarray(array, dtype=self.dtype)
        self.data.reshape(-1)[offset:] = source.reshape(-1)

    def copy_data(self, other: Tensor) -> None:
        """Overwrite the values with those of `other`, a tensor of the same size on any device."""
        self.copy_from_numpy(other.device.host(other.data))

    def set_value(self, value: float) -> None:
        """Overwrite every element with `value`."""
        self.data.fill(value)

    def gaussian(self, mean: float = 0.0, std: float = 1.0) -> None:
        """Overwrite the values with normal random numbers from the device's `host_rng`."""
        draw = self.device.host_rng.standard_normal(self.shape, dtype=self.dtype)
        self.data[...] = self.device.xp.asarray(draw * self.dtype.type(std) + self.dtype.type(mean))

    def uniform(self, low: float = 0.0, high: float = 1.0) -> None:
        """Overwrite the values with random numbers in [low, high) from the device's `host_rng`."""
        draw = self.device.host_rng.random(self.shape, dtype=self.dtype)
        self.data[...] = self.device.xp.asarray(draw * self.dtype.type(high - low) + self.dtype.type(low))

    # -- copies ------------------------------------------------------------------------------------------------------
    def clone(self) -> Tensor:
        """A new tensor with the same values and flags, outside the graph."""
        return Tensor(
            data=self.data.copy(),
            device=self.device,
            requires_grad=self.requires_grad,
            stores_grad=self.stores_grad,
            name=self.name,
        )

    copy = deepcopy = clone

    def as_type(self, dtype: DTypeLike) -> Tensor:
        """A new tensor with the values converted to `dtype`, outside the graph."""
        return Tensor(data=self.data.astype(dtype), device=self.device, requires_grad=self.requires_grad)

    def to_device(self, device: Device) -> None:
        """Move the values to `device`."""
        if device is not self.device:
            self.data = device.xp.asarray(self.device.host(self.data))
            self.device = device

    def to_host(self) -> None:
        """Move the values to the CPU."""
        self.to_device(get_default_device())

    # -- arithmetic --------------------------------------------------------------------------------------------------
    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements with other dimensions, one of which may be -1."""
        return Reshape(shape)(self)

    def __add__(self, other: Tensor | float) -> Tensor:
        return Add()(self, self._operand(other))

    __radd__ = __add__

    def __sub__(self, other: Tensor | float) -> Tensor:
        return Sub()(self, self._operand(other))

    def __rsub__(self, other: float) -> Tensor:
        return Sub()(self._operand(other), self)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return Mul()(self, self._operand(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return Div()(self, self._operand(other))

    def __rtruediv__(self, other: float) -> Tensor:
        return Div()(self._operand(other), self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return MatMul()(self, other)

    def __neg__(self) -> Tensor:
        return self * -1

    def __iadd__(self, other: Tensor | float) -> Tensor:
        return self._in_place(operator.iadd, other) or self + other

    def __isub__(self, other: Tensor | float) -> Tensor:
        return self._in_place(operator.isub, other) or self - other

    def __imul__(self, other: Tensor | float) -> Tensor:
        return self._in_place(operator.imul, other) or self * other

    def __itruediv__(self, other: Tensor | float) -> Tensor:
        return self._in_place(operator.itruediv, other) or self / other

    def _in_place(self, change: Callable[[Array, Array], Array], other: Tensor | float) -> Tensor | None:
        """This tensor, changed in place; None if the graph needs the old values and a new tensor is required."""
        other = self._operand(other)
        if self.creator is not None or other.creator is not None:
            return None
        if mode.ran is not None:
            mode.ran.append("a tensor is changed in place")
        change(self.data, other.data)
        return self

    def _operand(self, value: Tensor | float) -> Tensor:
        """`value` as a tensor; a number gets a type that preserves this tensor's dtype if possible."""
        if isinstance(value, Tensor):
            return value
        xp, dtype = self.device.xp, np.result_type(self.dtype, value)
        # Not `asarray`: on a GPU, it copies from the host, which a graph would not repeat.
        data = xp.asarray(value, dtype) if np.ndim(value) else xp.full((), np.asarray(value).item(), dtype)
        return Tensor(data=data, device=self.device)


class Operation:
    """One step of a forward pass. Subclasses implement `forward` and `backward`; an instance is used for one call.

    Attributes:
        native: whether, on the CPU, it computes only through kernels of `distopt.nn.kernels.cpu`.
        saved: what `forward` keeps for `backward`. It is released after the backward pass, as are `inputs`.
        inputs: the arguments, once recorded.
        needs: for each input, whether its gradient is needed.
        order: increases with every recorded call; descending order is a valid order for the backward pass.
    """

    native: ClassVar[bool] = False
    saved: Any = None
    inputs: tuple[Tensor, ...] | None = None
    needs: tuple[bool, ...]
    order: int

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Compute; record the call if in training mode and any input needs a gradient."""
        device = inputs[0].device
        if device.verbosity:
            data = device.timed(type(self).__name__, self.forward, *[t.data for t in inputs])
        else:
            data = self.forward(*[t.data for t in inputs])
        out = Tensor(data=data, device=device)
        if mode.training:
            needs = tuple([t.stores_grad or t.creator is not None for t in inputs])
            if True in needs:
                self.inputs, self.needs, self.order = inputs, needs, next(_order)
                out.creator = self
        if mode.ran is not None:
            mode.ran.append(Ran(self, inputs, out))
        return out

    def forward(self, *inputs: Array) -> Array:
        """The result, C-contiguous. Must not change the inputs."""
        raise NotImplementedError

    def backward(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        """The gradients of the inputs, given that of the result; None where `needs` is False.

        Args:
            dy: gradient of the result, which this call may overwrite or return.
            into: for each input that is a parameter, memory for its gradient. Writing the gradient there and returning
                that array saves a copy; any other array returned is copied there.

        Returns:
            C-contiguous arrays. No two of them may share memory, since their receivers may overwrite them.
        """
        raise NotImplementedError


_order = itertools.count()


class _Broadcast(Operation):
    """An element-wise operation on two arrays, with NumPy's broadcasting."""

    def reduced(self, gradient: Array, which: int) -> Array:
        """The sum of `gradient` over the axes along which input number `which` was repeated."""
        assert self.inputs is not None
        shape = self.inputs[which].shape
        if gradient.shape == shape:
            return gradient
        extra = gradient.ndim - len(shape)
        axes = [i + extra for i, n in enumerate(shape) if n == 1]
        return gradient.sum(axis=(*range(extra), *axes), keepdims=True).reshape(shape)


class Add(_Broadcast):
    """a + b."""

    def forward(self, a: Array, b: Array) -> Array:
        return (a + b)[...]  # an array even if NumPy returns a scalar

    def backward(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        da = self.reduced(dy, 0) if self.needs[0] else None
        db = self.reduced(dy.copy() if self.needs[0] else dy, 1) if self.needs[1] else None
        return da, db


class Sub(_Broadcast):
    """a - b."""

    def forward(self, a: Array, b: Array) -> Array:
        return (a - b)[...]

    def backward(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        da = self.reduced(dy, 0) if self.needs[0] else None
        return da, self.reduced(-dy, 1) if self.needs[1] else None


class Mul(_Broadcast):
    """a * b, element by element."""

    def forward(self, a: Array, b: Array) -> Array:
        self.saved = a, b
        return (a * b)[...]

    def backward(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        a, b = self.saved
        da = self.reduced(dy * b, 0) if self.needs[0] else None
        return da, self.reduced(dy * a, 1) if self.needs[1] else None


class Div(_Broadcast):
    """a / b, element by element."""

    def forward(self, a: Array, b: Array) -> Array:
        self.saved = a, b
        return (a / b)[...]

    def backward(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        a, b = self.saved
        da = self.reduced(dy / b, 0) if self.needs[0] else None
        return da, self.reduced(-dy * a / (b * b), 1) if self.needs[1] else None


class MatMul(Operation):
    """a [n, k] @ b [k, m]."""

    def forward(self, a: Array, b: Array) -> Array:
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
            raise UsageError(f"shapes {a.shape} and {b.shape} have no matrix product; [n, k] @ [k, m] has")
        self.saved = a, b
        return a @ b

    def backward(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        a, b = self.saved
        matmul = array_module(dy).matmul
        da = matmul(dy, b.T, out=into[0]) if self.needs[0] else None
        return da, matmul(a.T, dy, out=into[1]) if self.needs[1] else None


class Reshape(Operation):
    """The elements of x with other dimensions."""

    native = True

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def forward(self, x: Array) -> Array:
        self.saved = x.shape
        return x.reshape(self.shape)

    def backward(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        return (dy.reshape(self.saved),)


def from_numpy(array: np.ndarray[Any, Any], device: Device | None = None) -> Tensor:
    """A tensor with a copy of `array`, of the same dtype."""
    return Tensor(data=(device or get_default_device()).xp.array(array, order="C"), device=device)


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A copy of the values, as a NumPy array."""
    return tensor.to_numpy()
