"""Tensors, and the operations that make tensors from tensors.

A `Tensor` is an array with what training needs to know about it. An `Operation` computes one tensor and, while
`mode.training` is on, stays attached to it as its `creator`: the tensors and creators behind a loss are the graph that
`distopt.nn.autograd` walks. Arithmetic on tensors is made of operations too, so it has gradients like any layer.
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
        device: where it lives (default: the CPU).
        dtype: element type.
        data: an array to use, without copying it, in place of a new one; its shape and dtype count then.
        requires_grad: accepted for SINGA's scripts. Which gradients are computed follows from `stores_grad` alone.
        stores_grad: whether this is a parameter: `autograd.backward` yields its gradient.
        name: of a parameter, unique in its model, such as "conv1.W".

    Attributes:
        data: the array, C-contiguous. It may be changed in place.
        grad: of a parameter, its last gradient. Set it, and `backward` writes into that tensor's memory.
        creator: the operation that computed this tensor; None for inputs and parameters.
    """

    __slots__ = ("__weakref__", "creator", "data", "device", "grad", "name", "requires_grad", "stores_grad")
    __array_ufunc__ = None  # so that NumPy scalars leave arithmetic with tensors to this class

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
        """The value of a tensor of one element. Waits for the device; raises as `Device.check`."""
        value: float = self.data.item()
        self.device.check()
        return value

    # -- values ------------------------------------------------------------------------------------------------------
    def to_numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the values, as a NumPy array."""
        return np.array(self.device.host(self.data))

    def copy_from_numpy(self, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        """Overwrite the values by those of `array`, converted to this tensor's dtype.

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
        """Overwrite the values by those of `other`, a tensor of the same size on any device."""
        self.copy_from_numpy(other.device.host(other.data))

    def set_value(self, value: float) -> None:
        """Overwrite every element by `value`."""
        self.data.fill(value)

    def gaussian(self, mean: float = 0.0, std: float = 1.0) -> None:
        """Overwrite the values by normal random numbers from the device's `host_rng`."""
        draw = self.device.host_rng.standard_normal(self.shape, dtype=self.dtype)
        self.data[...] = self.device.xp.asarray(draw * self.dtype.type(std) + self.dtype.type(mean))

    def uniform(self, low: float = 0.0, high: float = 1.0) -> None:
        """Overwrite the values by random numbers of [low, high) from the device's `host_rng`."""
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
        """This tensor, changed; None where the graph needs the old values, so that the result must be a new one."""
        other = self._operand(other)
        if self.creator is not None or other.creator is not None:
            return None
        if mode.ran is not None:
            mode.ran.append("a tensor is changed in place")
        change(self.data, other.data)
        return self

    def _operand(self, value: Tensor | float) -> Tensor:
        """`value` as a tensor; a number takes a type that keeps this tensor's own where possible."""
        if isinstance(value, Tensor):
            return value
        xp, dtype = self.device.xp, np.result_type(self.dtype, value)
        # A number without `asarray`: on a GPU that copies from the host, which a graph would not do again.
        data = xp.asarray(value, dtype) if np.ndim(value) else xp.full((), np.asarray(value).item(), dtype)
        return Tensor(data=data, device=self.device)


class Operation:
    """One step of a forward pass. A subclass has `forward` and `backward`; an instance serves for one call.

    Attributes:
        native: whether it computes on the CPU by kernels of `ops.cpu` alone, and nothing by itself.
        saved: what `forward` keeps for `backward`. It and `inputs` are dropped after the backward pass.
        inputs: the arguments, once recorded.
        needs: which of the inputs a gradient is wanted for.
        order: grows with every recorded call; descending order is a valid order of the backward pass.
    """

    native: ClassVar[bool] = False
    saved: Any = None
    inputs: tuple[Tensor, ...] | None = None
    needs: tuple[bool, ...]
    order: int

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Compute, and record if training and if a gradient is wanted for any input."""
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
        """The result, C-contiguous. Inputs must stay as they are."""
        raise NotImplementedError

    def backward(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        """The gradients of the inputs, from that of the result; None where `needs` is False.

        Args:
            dy: gradient of the result. It belongs to this call, which may overwrite it or return it.
            into: for each input that is a parameter, the memory for its gradient. To write it there and return it
                saves a copy; anything else that is returned is copied there.

        Returns:
            C-contiguous arrays. No two of them share memory, since their receivers may overwrite them.
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
        return (a + b)[...]  # an array even where NumPy gives a scalar

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
