"""Tensors: arrays on devices (`core.device_array`) with the information that training needs.

A tensor that an operation (`core.operation`) has computed keeps it as its `creator`. The tensors and creators behind a
loss are the graph that `core.autograd` walks. Arithmetic on tensors uses operations, too, and so has gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ...checks import check_integer
from ...errors import UsageError
from ...kernels import check_resolved, check_unmasked
from ..devices.device import Device, device_of, get_default_device
from .arithmetic import Add, Div, MatMul, Mul, Reshape, Sub
from .array import Array, c_contiguous, element_type, float16, float32, in_range, settled
from .device_array import DeviceArray
from .mode import mode
from .operation import Operation


class Tensor(DeviceArray):
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

    __slots__ = ("__weakref__", "_requires_grad", "creator", "grad", "name", "stores_grad")
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

    @classmethod
    def of(cls, array: Array, device: Device | None = None, requires_grad: bool = True) -> Tensor:
        """A tensor that uses `array`, of any type, without a copy.

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
        """A tensor that shares the memory of an array of any library, such as a PyTorch tensor; keeps its dtype.

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

    # -- attributes --------------------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        label = f"{self.name}, " if self.name else ""
        return f"Tensor({label}{list(self.shape)}, {self.dtype}, {self.device!r})"

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
        """A new tensor outside the graph: the result of a function that NumPy and CuPy have.

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
        """Check that elements of this tensor can hold `values`; floats can hold all.

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
