"""Tensors: arrays with the information that training needs.

A tensor that an operation (`core.operation`) has computed keeps it as its `creator`. The tensors and creators behind a
loss are the graph that `core.autograd` walks. Arithmetic on tensors uses operations, too, and so has gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ...checks import check_integer
from ...errors import UsageError
from ...kernels import check_resolved, check_unmasked
from ..devices.device import Device, device_of, get_default_device
from . import changes
from .arithmetic import Add, Div, MatMul, Mul, Reshape, Sub
from .array import (
    Array,
    c_contiguous,
    check_numbers,
    element_type,
    float16,
    float32,
    float64,
    in_range,
    narrowed,
    settled,
)
from .mode import mode
from .operation import Operation
from .raw import RawTensor, raw


class Tensor:
    """An array on a device.

    Args:
        shape: dimensions of a new tensor of zeros.
        device: device of the tensor (default: the CPU, or where `data` is if that is a tensor or raw tensor).
        dtype: element type (default: float32, or that of `data`, where in arrays and numbers 64-bit types become 32-bit
            ones, and bool becomes int32). "float" is float32, "int" int32.
        data: values to copy; overrides `shape`. As in SINGA, a raw tensor (`Tensor.data`) is used without a copy,
            unless it is on another device or of another type.
        requires_grad: see the property.
        stores_grad: whether this is a parameter: `autograd.backward` yields its gradient, unless it is frozen.
        creator: the operation that computed this tensor.
        name: name of a parameter, unique in its model, such as "conv1.W".

    Attributes:
        array: the values, a C-contiguous NumPy or CuPy array. It may be changed in place.
        device: the device that holds `array`.
        grad: the last gradient of a parameter. If set, `backward` writes into that tensor's memory.
        creator: the operation that computed this tensor; None for inputs and parameters.

    Raises:
        UsageError: no tensor has that shape, data or dtype.
    """

    __slots__ = ("__weakref__", "_requires_grad", "array", "creator", "device", "grad", "name", "stores_grad")
    array: Array
    device: Device
    __array_ufunc__ = None  # makes NumPy scalars defer to this class in arithmetic

    def __init__(
        self,
        shape: Sequence[int] = (),
        device: Device | None = None,
        dtype: DTypeLike | None = None,
        data: Any = None,
        requires_grad: bool = True,
        stores_grad: bool = False,
        creator: Operation | None = None,
        name: str | None = None,
    ) -> None:
        self._allocate(shape, device, dtype, data)
        if stores_grad and self.dtype == float16:
            self._allocate(shape, device, float32, data)  # the master weights of half precision
        self.grad: Tensor | None = None
        self.creator = creator
        self._requires_grad = requires_grad
        self.stores_grad = stores_grad
        self.name = name

    def _allocate(self, shape: Sequence[int], device: Device | None, dtype: DTypeLike | None, data: Any) -> None:
        """Set `array` and `device`; the arguments are as in the constructor."""
        if device is not None and not isinstance(device, Device):
            raise UsageError(f"{device!r} is no device; device.get_default_device() is one")
        try:
            dtype = None if dtype is None else element_type(dtype)
            if data is None:
                self.device = get_default_device() if device is None else device
                self.array = self.device.xp.zeros(
                    [check_integer("a size of the shape", n) for n in shape], float32 if dtype is None else dtype
                )
            else:
                self._take(data, device, dtype)
        except UsageError:
            raise
        except (TypeError, ValueError) as error:
            what = f"shape {shape!r}" if data is None else f"such data, a {type(data).__name__}"
            raise UsageError(f"no tensor has {what} ({error}); pass a tuple of sizes or an array of numbers") from None

    def _take(self, data: Any, device: Device | None, dtype: np.dtype[Any] | None) -> None:
        if type(data) is not np.ndarray:
            check_unmasked(data)
            tensor = isinstance(data, Tensor)
            home, values = (data.device, data.array) if tensor else (device_of(data), data)
            if tensor or isinstance(data, RawTensor) or home.kind != "cpu":
                self.device = home if device is None else device
                dtype = data.dtype if dtype is None else dtype
                if self.device is home and dtype == data.dtype and not tensor:
                    self.data = data
                else:
                    self.array = self.device.xp.array(home.host(values), dtype, order="C")
                return
            if not isinstance(getattr(data, "dtype", np.dtype(float32)), np.dtype):  # a tensor of PyTorch
                data = np.asarray(data)
        self.device = get_default_device() if device is None else device
        self.array = self.device.xp.array(data, narrowed(data) if dtype is None else dtype, order="C")

    @classmethod
    def of(cls, array: Array, device: Device | None = None, requires_grad: bool = True) -> Tensor:
        """Local. A tensor that uses `array`, of any type, without a copy.

        Raises:
            UsageError: the array is not C-contiguous.
        """
        tensor = cls.__new__(cls)
        tensor.device = get_default_device() if device is None else device
        tensor.array = c_contiguous(array)
        tensor.grad = tensor.creator = tensor.name = None
        tensor._requires_grad, tensor.stores_grad = requires_grad, False
        return tensor

    @classmethod
    def from_dlpack(cls, array: Any) -> Tensor:
        """Local. A tensor that shares the memory of an array of any library, such as a PyTorch tensor; keeps its dtype.

        Until NumPy 2.1, the memory of another library's array on the CPU is read-only.

        Raises:
            UsageError: the array is not C-contiguous, or a tensor of PyTorch that is negated as it is read.
        """
        check_resolved(array)
        if array.__dlpack_device__()[0] == 1:  # kDLCPU of dlpack.h
            array = array.array if isinstance(array, Tensor) else array
            array = np.asarray(array) if isinstance(array, np.ndarray) else np.from_dlpack(array)
        else:
            import cupy

            array = array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)
        return cls.of(array, device_of(array))

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    # -- attributes --------------------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        label = f"{self.name}, " if self.name else ""
        return f"Tensor({label}{list(self.shape)}, {self.dtype}, {self.device!r})"

    @property
    def data(self) -> Array:
        """The values as a raw tensor of SINGA's, which shares their memory; see `distopt.nn.core.raw`."""
        return raw(self.array)

    @data.setter
    def data(self, array: Array) -> None:
        self.array = c_contiguous(array.view(np.ndarray) if isinstance(array, RawTensor) else array)
        self.device = device_of(array)

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

    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def memsize(self) -> int:
        """Bytes of the elements."""
        return self.size() * self.dtype.itemsize

    @property
    def requires_grad(self) -> bool:
        """Whether the gradient of this tensor is computed, if it is a parameter or `Operation.backward` is called.

        False freezes a parameter: optimizers leave it alone. All ranks may assign the same value between two steps.
        """
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        mode.freezes += self.stores_grad and value != self._requires_grad
        self._requires_grad = value

    @property
    def in_graph(self) -> bool:
        """Whether this tensor was computed from parameters that train, so that a backward pass goes through it."""
        return self.creator is not None and True in self.creator.needs

    # -- to the host -------------------------------------------------------------------------------------------------
    def to_numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the values, as a NumPy array."""
        return np.array(self.device.host(self.array))

    numpy = to_numpy  # PyTorch's name

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """A copy of the values, for `numpy.asarray` and NumPy's functions.

        Raises:
            UsageError: `copy` is False.
        """
        if copy is False:
            raise UsageError("an array of a tensor's values is a copy; Tensor.array is the tensor's own memory")
        return np.array(self.device.host(self.array), dtype)

    def item(self) -> float:
        """The value of a tensor of one element. Waits for the device; raises the errors of `Device.check`.

        Raises:
            UsageError: there are more elements, or none.
        """
        if self.size() != 1:
            raise UsageError(f"a tensor of shape {self.shape} is not a number; take one element, or its to_numpy()")
        value: float = self.array.item()
        self.device.check()
        return value

    def __float__(self) -> float:
        return float(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __bool__(self) -> bool:
        """The truth of one element. Several elements have none, so that `a == b` cannot pass for one answer."""
        if self.size() != 1:
            raise UsageError(
                f"a tensor of shape {self.shape} is neither true nor false; compare it by `is`, or its to_numpy()"
            )
        return bool(self.item())

    # -- overwriting -------------------------------------------------------------------------------------------------
    def changed(self) -> Tensor:
        """Local. Report that this tensor changes in place, as a graph may need the old values; return it."""
        changes.changed(self.array)
        return self

    def copy_from_numpy(self, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        """Overwrite the values with those of `array`, converted to this tensor's dtype.

        Args:
            array: any shape.
            offset: index of the first element to overwrite; 0 needs an array of the tensor's size.

        Raises:
            UsageError: the sizes do not fit, or the array holds no numbers.
        """
        check_unmasked(array)
        array = np.asarray(array)
        check_numbers(array.dtype)
        offset = check_integer("offset", offset)
        if offset < 0 or array.size != self.size() - offset:
            raise UsageError(
                f"an array of shape {array.shape} does not fill a tensor of shape {self.shape} from element {offset}"
            )
        source = self.device.xp.asarray(array, dtype=self.dtype)
        self.changed().array.reshape(-1)[offset:] = source.reshape(-1)

    def copy_data(self, other: Tensor) -> None:
        """Overwrite the values with those of `other`, a tensor of the same size on any device."""
        self.copy_from(other)

    def copy_from(self, source: Tensor | np.ndarray[Any, Any], offset: int = 0) -> None:
        """As `copy_data` from a tensor, as `copy_from_numpy` from an array."""
        self.copy_from_numpy(source.device.host(source.array) if isinstance(source, Tensor) else source, offset)

    def set_value(self, value: float) -> Tensor:
        """Overwrite every element with `value`; return this tensor.

        Raises:
            UsageError: the elements cannot hold it.
        """
        try:
            self.array.fill(value)
        except (OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"elements of {self.dtype} cannot hold {value!r} ({error}); convert by to_type") from None
        return self.changed()

    def gaussian(self, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Overwrite the values with normal random numbers from the device's `host_rng`; return this tensor."""
        return self._draw("standard_normal", std, mean)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Overwrite the values with random numbers in [low, high) from the device's `host_rng`; return this tensor."""
        return self._draw("random", high - low, low)

    def bernoulli(self, p: float) -> Tensor:
        """Overwrite each element with 1 with probability `p`, else 0, from the device's `host_rng`; return this."""
        draw = self.device.host_rng.random(self.shape, dtype=float32) < p
        self.changed().array[...] = self.device.xp.asarray(draw)
        return self

    def _draw(self, method: str, scale: float, shift: float) -> Tensor:
        # float16 is rounded from float32, for NumPy draws no float16.
        dtype = np.dtype(float64 if self.dtype == float64 else float32)
        draw = getattr(self.device.host_rng, method)(self.shape, dtype=dtype)
        self.changed().array[...] = self.device.xp.asarray(draw * dtype.type(scale) + dtype.type(shift))
        return self

    def to_type(self, dtype: DTypeLike) -> Tensor:
        """Convert the values to `dtype`, in new memory; return this tensor. "float" is float32, "int" int32.

        Raises:
            UsageError: there is no such type.
        """
        self.array = self.array.astype(element_type(dtype))
        return self.changed()

    def to_device(self, device: Device) -> None:
        """Move the values to `device`."""
        if device is not self.device:
            self.array, self.device = device.xp.asarray(self.device.host(self.array)), device
            self.changed()

    def to_host(self) -> None:
        """Move the values to the CPU."""
        self.to_device(get_default_device())

    # -- new tensors outside the graph -------------------------------------------------------------------------------
    def copy(self) -> Tensor:
        """A new tensor that shares the memory of this one, outside the graph, as in SINGA."""
        return self.of(self.array, self.device)

    def clone(self) -> Tensor:
        """A new tensor with the same values in memory of its own, outside the graph; no parameter even if this is."""
        return self.of(self.array.copy(), self.device)

    def as_type(self, dtype: DTypeLike) -> Tensor:
        """A new tensor with the values converted to `dtype`, outside the graph. "float" is float32, "int" int32.

        Raises:
            UsageError: there is no such type.
        """
        return self.of(self.array.astype(element_type(dtype)), self.device)

    def transpose(self, axes: Sequence[int] | None = None) -> Tensor:
        """A new tensor with the dimensions in the order `axes` (default: reversed), outside the graph."""
        return self.compute("transpose", self.clone(), axes)  # NumPy's result may share memory

    def repeat(self, repeats: int | Sequence[int], axis: int | None = None) -> Tensor:
        """A new tensor that repeats each element, or slice along `axis`, as `numpy.repeat` does; outside the graph."""
        times = [check_integer("a number of repeats", n, 0) for n in np.ravel(repeats).tolist()]
        return self.compute("repeat", self, times, axis=axis)

    def __getitem__(self, keys: int | slice | tuple[int | slice, ...]) -> Tensor:
        """A copy of a part, outside the graph. As in SINGA, an index keeps its dimension, which then has size 1.

        Raises:
            UsageError: an index is out of range, or is neither an int nor a slice.
        """
        keys = keys if isinstance(keys, tuple) else (keys,)
        if len(keys) > len(self.shape):
            raise UsageError(f"{len(keys)} indices are too many for a tensor of shape {self.shape}")
        parts = []
        for key, size in zip(keys, self.shape, strict=False):
            if not isinstance(key, slice):
                try:
                    index = range(size)[check_integer("an index", key)]
                except (IndexError, UsageError):
                    raise UsageError(f"{key!r} does not index the shape {self.shape}; ints and slices do") from None
                key = slice(index, index + 1)
            parts.append(key)
        return self.of(self.array[tuple(parts)].copy(), self.device)

    __iter__ = None  # Python would otherwise iterate by `__getitem__`

    def compute(self, name: str, *operands: Any, **options: Any) -> Tensor:
        """Local. A new tensor outside the graph: the result of a function that NumPy and CuPy have.

        Args:
            name: of the function.
            operands: the arguments: tensors, lists of tensors, and other values. `self` is not among them by itself.
            options: arguments by name.

        Returns:
            A tensor of at least one dimension, on this tensor's device, of the type that `settled` gives. Booleans
            become 0.0 and 1.0.

        Raises:
            UsageError: the function refuses the arguments.
        """
        tensors = [t for x in operands for t in (x if isinstance(x, list) else [x]) if isinstance(t, Tensor)]
        xp = self.device.xp
        try:
            result = getattr(xp, name)(*map(_arrays, operands), **options)
        except (TypeError, ValueError, IndexError) as error:
            shapes = ", ".join(str(t.shape) for t in tensors)
            raise UsageError(f"{name} does not take tensors of shape {shapes}: {error}") from None
        if result.dtype.kind == "b":
            result = result.astype(float32)
        result = settled(result, *[t.array for t in tensors])
        return self.of(xp.ascontiguousarray(result) if result.ndim else result.reshape(1), self.device)

    # -- arithmetic, part of the graph -------------------------------------------------------------------------------
    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements with other dimensions, where one may be -1."""
        return self._computed(Reshape(shape), self)

    def __add__(self, other: Any) -> Tensor:
        return self._computed(Add(), self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return self._computed(Sub(), self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return self._computed(Sub(), other, self)

    def __mul__(self, other: Any) -> Tensor:
        return self._computed(Mul(), self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        return self._computed(Div(), self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return self._computed(Div(), other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return self._computed(MatMul(), self, other)

    def __neg__(self) -> Tensor:
        return self * -1

    def __iadd__(self, other: Any) -> Tensor:
        return self._in_place(operator.iadd, operator.add, other)

    def __isub__(self, other: Any) -> Tensor:
        return self._in_place(operator.isub, operator.sub, other)

    def __imul__(self, other: Any) -> Tensor:
        return self._in_place(operator.imul, operator.mul, other)

    def __itruediv__(self, other: Any) -> Tensor:
        return self._in_place(operator.itruediv, operator.truediv, other)

    def _in_place(self, change: Callable[[Array, Array], Array], compute: Callable[..., Tensor], other: Any) -> Tensor:
        """Change this tensor in place, and return it; or a new tensor, if one of the two is in a graph with parameters.

        A later backward pass that needs the old values raises an error.
        """
        given = self.operand(other)
        if self.in_graph or given.in_graph:
            return compute(self, given)
        # A quotient is a float, even of integers.
        self.check_takes(self.operand(0.5) if change is operator.itruediv else given, given is other)
        change(self.changed().array, given.array)
        return self

    def check_takes(self, values: Tensor, same_kind: bool = False) -> None:
        """Local. Check that elements of this tensor can hold `values`; floats can hold all.

        Args:
            values: a result of `operand`.
            same_kind: whether integers of a wider type are taken, too.

        Raises:
            UsageError: they cannot.
        """
        if self.dtype.kind != "f" and not np.can_cast(values.dtype, self.dtype, "same_kind" if same_kind else "safe"):
            given = "floats" if values.dtype.kind == "f" else values.dtype
            raise UsageError(f"a tensor of {self.dtype} takes no {given}; convert it first, by to_type")

    def _computed(self, operation: Operation, *operands: Any) -> Tensor:
        """The result of an arithmetic operation. It is in the graph only if it depends on a parameter that trains.

        Otherwise a sum that a script keeps over many steps would keep the tensors of every step alive.
        """
        out = operation(*map(self.operand, operands))
        if True not in operation.needs:
            out.creator = None
        return out

    def operand(self, value: Any) -> Tensor:
        """`value` as a tensor. A number or array takes this tensor's dtype, or float32 if only `value` is a float.

        Integers outside the range of this tensor's dtype keep NumPy's dtype, as does the result; integers of more than
        64 bits become floats.

        Raises:
            UsageError: it is neither a tensor nor a number nor an array of numbers.
        """
        if isinstance(value, Tensor):
            return value
        check_unmasked(value)
        try:
            given = value if hasattr(value, "dtype") else np.asarray(value)
            if given.dtype.kind == "O" and isinstance(value, int):
                given = np.asarray(float(value))
        except (OverflowError, ValueError):  # an integer beyond the floats, or lists of several lengths: refused below
            given = np.asarray(None)
        if given.dtype.kind not in "biuf":
            raise UsageError(f"tensors compute with tensors, arrays and numbers, not with {value!r}")
        dtype = np.dtype(float32) if given.dtype.kind == "f" != self.dtype.kind else self.dtype
        if dtype.kind in "iu" and not in_range(given, dtype):
            dtype = given.dtype
        xp = self.device.xp
        # Not `asarray`: on a GPU, it copies from the host, which a graph would not repeat.
        array = xp.ascontiguousarray(given, dtype) if given.ndim else xp.full((), given.item(), dtype)
        return self.of(array, self.device, requires_grad=False)

    # -- comparison, outside the graph -------------------------------------------------------------------------------
    def __eq__(self, other: object) -> Any:
        """1.0 where equal, else 0.0. The comparison with anything but numbers, such as None, is False.

        Dictionaries and sets compare only keys of equal hash, so tensors as keys still work by identity.
        """
        return self._compared("equal", other)

    def __ne__(self, other: object) -> Any:
        """1.0 where not equal, else 0.0. The comparison with anything but numbers, such as None, is True."""
        return self._compared("not_equal", other)

    __hash__ = object.__hash__

    def _compared(self, name: str, other: object) -> Any:
        try:
            value = self.operand(other)
        except UsageError:
            return NotImplemented
        return self.compute(name, self, value)

    def __lt__(self, other: Any) -> Tensor:
        return self.compute("less", self, self.operand(other))

    def __le__(self, other: Any) -> Tensor:
        return self.compute("less_equal", self, self.operand(other))

    def __gt__(self, other: Any) -> Tensor:
        return self.compute("greater", self, self.operand(other))

    def __ge__(self, other: Any) -> Tensor:
        return self.compute("greater_equal", self, self.operand(other))

    def __floordiv__(self, other: Any) -> Tensor:
        return self.compute("floor_divide", self, self.operand(other))

    # -- SINGA's -----------------------------------------------------------------------------------------------------
    deepcopy = contiguous = clone

    def T(self) -> Tensor:  # noqa: N802 - SINGA's name
        """As `transpose`: a copy, where SINGA's shares memory."""
        return self.transpose()

    def reset_like(self, other: Tensor) -> None:
        """Become zeros of the shape, dtype and device of `other`."""
        self.array, self.device = other.device.xp.zeros(other.shape, other.dtype), other.device
        self.changed()

    def l1(self) -> float:
        """Mean of the absolute values, as in SINGA."""
        return float(np.abs(self.device.host(self.array)).mean(dtype=float64))

    def l2(self) -> float:
        """Euclidean norm divided by the number of elements, as in SINGA."""
        return float(np.sqrt(np.square(self.device.host(self.array), dtype=float64).sum())) / self.size()

    def is_empty(self) -> bool:
        """Whether the tensor has zero dimensions, which SINGA calls empty."""
        return self.shape == ()

    def is_transpose(self) -> bool:
        """False: the elements are always in the order of their indices."""
        return False

    def is_dummy(self) -> bool:
        """Whether this tensor has no name."""
        return self.name is None


def from_raw_tensor(raw: Any) -> Tensor:
    """A tensor that shares the memory of a raw tensor: `Tensor.data`, or a gradient of `Operation.backward`."""
    return Tensor.of(raw.view(np.ndarray) if isinstance(raw, np.ndarray) else raw, device_of(raw))


def _arrays(operand: Any) -> Any:
    if isinstance(operand, Tensor):
        return operand.array
    return [_arrays(item) for item in operand] if isinstance(operand, list) else operand
