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
from . import half
from .device import Device, device_of, get_default_device, tell_once
from .mode import Ran, mode
from .raw import RawTensor, raw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike
    from typing_extensions import Self

__all__ = [
    "Operation",
    "Tensor",
    "float16",
    "float32",
    "float64",
    "from_numpy",
    "from_raw_tensor",
    "int32",
    "int64",
    "to_numpy",
]

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray

float16 = np.float16
float32 = np.float32
float64 = np.float64
int32 = np.int32
int64 = np.int64


class Tensor:
    """An array on a device.

    Args:
        shape: dimensions of a new tensor of zeros.
        device: device of the tensor (default: the CPU).
        dtype: element type (default: float32, or that of `data` with 64-bit types made 32-bit).
        data: values to copy, as SINGA does; overrides `shape`. A raw tensor (`Tensor.data`) is used without a copy.
        requires_grad: whether `Operation.backward` returns a gradient for it. Which gradients a backward pass computes
            depends on `stores_grad` alone.
        stores_grad: whether this is a parameter: `autograd.backward` yields its gradient.
        creator: the operation that computed this tensor.
        name: name of a parameter, unique in its model, such as "conv1.W".

    Attributes:
        array: the values, a C-contiguous NumPy or CuPy array. It may be changed in place.
        grad: the last gradient of a parameter. If set, `backward` writes into that tensor's memory.
        creator: the operation that computed this tensor; None for inputs and parameters.
    """

    __slots__ = ("__weakref__", "array", "creator", "device", "grad", "name", "requires_grad", "stores_grad")
    __array_ufunc__ = None  # makes NumPy scalars defer to this class in arithmetic

    def __init__(
        self,
        shape: Sequence[int] = (),
        device: Device | None = None,
        dtype: DTypeLike | None = None,
        data: Array = None,
        requires_grad: bool = True,
        stores_grad: bool = False,
        creator: Operation | None = None,
        name: str | None = None,
    ) -> None:
        self.device = get_default_device() if device is None else device
        if dtype is not None and stores_grad and np.dtype(dtype) == np.float16:
            dtype = float32  # the master weights of half precision
        if data is None:
            self.array: Array = self.device.xp.zeros(tuple(shape), float32 if dtype is None else dtype)
        elif isinstance(data, RawTensor):
            self.array = _contiguous(data.view(np.ndarray))
        else:
            self.array = self.device.xp.array(data, _narrow(data) if dtype is None else dtype, order="C")
        self.grad: Tensor | None = None
        self.creator = creator
        self.requires_grad = requires_grad
        self.stores_grad = stores_grad
        self.name = name

    @classmethod
    def of(cls, array: Array, device: Device | None = None, requires_grad: bool = True) -> Tensor:
        """Local. A tensor that uses `array`, of any type, without a copy.

        Raises:
            UsageError: the array is not C-contiguous.
        """
        tensor = cls.__new__(cls)
        tensor.device = get_default_device() if device is None else device
        tensor.array = _contiguous(array)
        tensor.grad = tensor.creator = tensor.name = None
        tensor.requires_grad, tensor.stores_grad = requires_grad, False
        return tensor

    @property
    def in_graph(self) -> bool:
        """Whether it was computed from parameters, so that a backward pass goes through it."""
        return self.creator is not None and True in self.creator.needs

    @property
    def data(self) -> Array:
        """The values as a raw tensor of SINGA's, which shares their memory; see `distopt.nn.raw`."""
        return raw(self.array)

    @data.setter
    def data(self, array: Array) -> None:
        self.array = _contiguous(array.view(np.ndarray) if isinstance(array, RawTensor) else array)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        dtype: np.dtype[Any] = self.array.dtype
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
        value: float = self.array.item()
        self.device.check()
        return value

    # -- values ------------------------------------------------------------------------------------------------------
    def to_numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the values, as a NumPy array."""
        return np.array(self.device.host(self.array))

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
        self.array.reshape(-1)[offset:] = source.reshape(-1)

    def copy_data(self, other: Tensor) -> None:
        """Overwrite the values with those of `other`, a tensor of the same size on any device."""
        self.copy_from_numpy(other.device.host(other.array))

    def set_value(self, value: float) -> Self:
        """Overwrite every element with `value`; return this tensor."""
        self.array.fill(value)
        return self

    def gaussian(self, mean: float = 0.0, std: float = 1.0) -> Self:
        """Overwrite the values with normal random numbers from the device's `host_rng`; return this tensor."""
        return self._draw("standard_normal", std, mean)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Self:
        """Overwrite the values with random numbers in [low, high) from the device's `host_rng`; return this tensor."""
        return self._draw("random", high - low, low)

    def bernoulli(self, p: float) -> Self:
        """Overwrite each element with 1 with probability `p`, else 0, from the device's `host_rng`; return this."""
        draw = self.device.host_rng.random(self.shape, dtype=float32) < p
        self.array[...] = self.device.xp.asarray(draw)
        return self

    def _draw(self, method: str, scale: float, shift: float) -> Self:
        # float16 is rounded from float32, for NumPy draws no float16.
        dtype = np.dtype(float64 if self.dtype == float64 else float32)
        draw = getattr(self.device.host_rng, method)(self.shape, dtype=dtype)
        self.array[...] = self.device.xp.asarray(draw * dtype.type(scale) + dtype.type(shift))
        return self

    # -- copies ------------------------------------------------------------------------------------------------------
    def clone(self) -> Tensor:
        """A new tensor with the same values and flags, outside the graph."""
        tensor = Tensor.of(self.array.copy(), self.device, self.requires_grad)
        tensor.stores_grad, tensor.name = self.stores_grad, self.name
        return tensor

    copy = deepcopy = clone

    def as_type(self, dtype: DTypeLike) -> Tensor:
        """A new tensor with the values converted to `dtype`, outside the graph."""
        return Tensor.of(self.array.astype(dtype), self.device, self.requires_grad)

    def to_device(self, device: Device) -> None:
        """Move the values to `device`."""
        if device is not self.device:
            self.array = device.xp.asarray(self.device.host(self.array))
            self.device = device

    def to_host(self) -> None:
        """Move the values to the CPU."""
        self.to_device(get_default_device())

    # -- arithmetic --------------------------------------------------------------------------------------------------
    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements with other dimensions, one of which may be -1."""
        return self._computed(Reshape(shape), self)

    def __add__(self, other: Tensor | float) -> Tensor:
        return self._computed(Add(), self, other)

    __radd__ = __add__

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self._computed(Sub(), self, other)

    def __rsub__(self, other: float) -> Tensor:
        return self._computed(Sub(), other, self)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return self._computed(Mul(), self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return self._computed(Div(), self, other)

    def __rtruediv__(self, other: float) -> Tensor:
        return self._computed(Div(), other, self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self._computed(MatMul(), self, other)

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
        other = self.operand(other)
        if self.in_graph or other.in_graph:
            return None
        if mode.ran is not None:
            mode.ran.append("a tensor is changed in place")
        change(self.array, other.array)
        return self

    def _computed(self, operation: Operation, *operands: Tensor | float) -> Tensor:
        """The result of an arithmetic operation: part of the graph only if a parameter is below it.

        Otherwise sums that scripts keep over many steps would keep every step's tensors alive.
        """
        out = operation(*map(self.operand, operands))
        if True not in operation.needs:
            out.creator = None
        return out

    def operand(self, value: Tensor | float) -> Tensor:
        """`value` as a tensor; a number gets a type that preserves this tensor's dtype if possible."""
        if isinstance(value, Tensor):
            return value
        xp, dtype = self.device.xp, np.result_type(self.dtype, value)
        # Not `asarray`: on a GPU, it copies from the host, which a graph would not repeat.
        data = xp.asarray(value, dtype) if np.ndim(value) else xp.full((), np.asarray(value).item(), dtype)
        return Tensor.of(data, self.device)


class Operation:
    """One step of a forward pass. Subclasses implement `forward` and `gradients`; an instance is used for one call.

    Attributes:
        native: whether, on the CPU, it computes only through kernels of `distopt.nn.kernels.cpu`.
        saved: what `forward` keeps for `gradients`. It is released after the backward pass, as are `inputs`.
        inputs: the arguments, once recorded.
        needs: for each input, whether a backward pass needs its gradient.
        half: whether it runs in half precision, see `distopt.nn.half`.
        is_loss: whether its result stays float32 in half precision.
        order: increases with every recorded call; descending order is a valid order for the backward pass.
    """

    native: ClassVar[bool] = False
    saved: Any = None
    inputs: tuple[Tensor, ...] | None = None
    needs: tuple[bool, ...] = ()
    half: bool = False
    is_loss: ClassVar[bool] = False
    order: int

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Compute; record the call in training mode."""
        device, arrays = inputs[0].device, [t.array for t in inputs]
        if arrays[0].dtype.char == "e":
            self.half = True
        data = device.timed(type(self).__name__, self._compute, arrays) if device.verbosity else self._compute(arrays)
        out = Tensor.of(data, device)
        if mode.training:
            self.inputs, self.order, out.creator = inputs, next(_order), self
            self.needs = tuple([t.stores_grad or t.in_graph for t in inputs])
        if mode.ran is not None:
            mode.ran.append(Ran(self, inputs, out))
        return out

    def _compute(self, arrays: list[Array]) -> Array:
        return half.compute(self, arrays) if self.half else self.forward(*arrays)

    def walk(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        """`gradients`, in half precision where the forward pass was."""
        return half.gradients(self, dy, into) if self.half else self.gradients(dy, into)

    def forward(self, *inputs: Array) -> Array:
        """The result, C-contiguous. Must not change the inputs."""
        raise NotImplementedError

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        """The gradients of the inputs, given that of the result; None where `needs` is False.

        Args:
            dy: gradient of the result, which this call may overwrite or return.
            into: for each input that is a parameter, memory for its gradient. Writing the gradient there and returning
                that array saves a copy; any other array returned is copied there.

        Returns:
            C-contiguous arrays. No two of them may share memory, since their receivers may overwrite them.
        """
        raise NotImplementedError

    def backward(self, dy: Array = None) -> Any:
        """Local. The gradients of the inputs, for scripts that walk a graph by hand, as SINGA's unit tests do.

        Args:
            dy: gradient of the result, an array (default: 1, for a loss). It is not changed.

        Returns:
            A raw tensor, or a tuple of several; inputs that have no gradient, or do not require one, are left out.

        Raises:
            UsageError: the operation was not recorded, or a backward pass has released it.
        """
        if self.inputs is None:
            raise UsageError(
                f"{type(self).__name__} was not recorded, or its graph was walked before; compute it in training mode"
            )
        x, needs = self.inputs[0], self.needs
        xp, dtype = x.device.xp, x.dtype if x.dtype.kind == "f" else float32
        self.needs = tuple([t.requires_grad for t in self.inputs])
        try:
            gradients = self.walk(xp.ones(1, dtype) if dy is None else xp.array(dy), [None] * len(needs))
        finally:
            self.needs = needs
        pairs = zip(gradients, self.inputs, strict=True)
        wanted = tuple([raw(g) for g, t in pairs if g is not None and t.requires_grad])
        return wanted[0] if len(wanted) == 1 else wanted


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

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        da = self.reduced(dy, 0) if self.needs[0] else None
        db = self.reduced(dy.copy() if self.needs[0] else dy, 1) if self.needs[1] else None
        return da, db


class Sub(_Broadcast):
    """a - b."""

    def forward(self, a: Array, b: Array) -> Array:
        return (a - b)[...]

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        da = self.reduced(dy, 0) if self.needs[0] else None
        return da, self.reduced(-dy, 1) if self.needs[1] else None


class Mul(_Broadcast):
    """a * b, element by element."""

    def forward(self, a: Array, b: Array) -> Array:
        self.saved = a, b
        return (a * b)[...]

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        a, b = self.saved
        da = self.reduced(dy * b, 0) if self.needs[0] else None
        return da, self.reduced(dy * a, 1) if self.needs[1] else None


class Div(_Broadcast):
    """a / b, element by element."""

    def forward(self, a: Array, b: Array) -> Array:
        self.saved = a, b
        return (a / b)[...]

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
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

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
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

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        return (dy.reshape(self.saved),)


def _narrow(data: Any) -> DTypeLike:
    """The type in which SINGA keeps values of the type of `data`: 64-bit numbers become 32-bit ones."""
    dtype = np.asarray(data).dtype if not hasattr(data, "dtype") else data.dtype
    if dtype == np.float64:
        tell_once("float64 data becomes float32, as in SINGA; dtype=tensor.float64 keeps it")
        return float32
    narrow: DTypeLike = int32 if dtype == np.int64 else dtype
    return narrow


def _contiguous(array: Array) -> Array:
    if not array.flags.c_contiguous:
        raise UsageError("a tensor cannot use a strided array; pass a contiguous one (numpy.ascontiguousarray)")
    return array


def from_numpy(array: np.ndarray[Any, Any], device: Device | None = None, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor with a copy of `array`, in `dtype` (default: its own, with 64-bit types made 32-bit, as in SINGA)."""
    return Tensor(data=array, device=device, dtype=dtype)


def from_raw_tensor(raw: Any) -> Tensor:
    """A tensor that shares the memory of a raw tensor: `Tensor.data`, or a gradient of `Operation.backward`."""
    return Tensor.of(raw.view(np.ndarray) if isinstance(raw, np.ndarray) else raw, device_of(raw))


def to_numpy(values: Any) -> np.ndarray[Any, Any]:
    """A copy of a tensor, raw tensor, array or plain number, as a NumPy array; a number gives [1]."""
    if isinstance(values, Tensor):
        return values.to_numpy()
    return np.array(device_of(values).host(values), ndmin=1)
