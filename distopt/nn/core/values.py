"""Values on a device: how they are made, read, overwritten, converted and copied."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ...errors import UsageError, check_integer
from ...kernels import check_unmasked
from ..devices.device import Device, device_of, get_default_device, tell_once
from . import changes
from .mode import mode
from .raw import RawTensor, raw

if TYPE_CHECKING:
    from typing_extensions import Self

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray

float16 = np.float16
float32 = np.float32
float64 = np.float64
int32 = np.int32
int64 = np.int64


class Values:
    """An array on a device, without the parts for training. The arguments are those of `Tensor`.

    Attributes:
        array: the values, a C-contiguous NumPy or CuPy array. It may be changed in place.
        device: where they are.
    """

    __slots__ = ("array", "device")
    array: Array
    device: Device

    def __init__(
        self, shape: Sequence[int] = (), device: Device | None = None, dtype: DTypeLike | None = None, data: Any = None
    ) -> None:
        if device is not None and not isinstance(device, Device):
            raise UsageError(f"{device!r} is no device; device.get_default_device() is one")
        try:
            dtype = None if dtype is None else _type(dtype)
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
            tensor = isinstance(data, Values)
            home, values = (data.device, data.array) if tensor else (device_of(data), data)
            if tensor or isinstance(data, RawTensor) or home.kind != "cpu":
                self.device = home if device is None else device
                dtype = data.dtype if dtype is None else dtype
                if self.device is home and dtype == data.dtype and not tensor:
                    self.data = data
                else:
                    self.array = self.device.xp.array(home.host(values), dtype, order="C")
                return
        self.device = get_default_device() if device is None else device
        self.array = self.device.xp.array(data, _narrow(data) if dtype is None else dtype, order="C")

    @classmethod
    def of(cls, array: Array, device: Device | None = None) -> Self:
        """Local. Values that use `array`, of any type, without a copy.

        Raises:
            UsageError: the array is not C-contiguous.
        """
        values = cls.__new__(cls)
        values.device = get_default_device() if device is None else device
        values.array = c_contiguous(array)
        return values

    @classmethod
    def from_dlpack(cls, array: Any) -> Self:
        """Local. Values that share the memory of an array of any library, such as a PyTorch tensor; keeps its dtype.

        Raises:
            UsageError: the array is not C-contiguous.
        """
        if array.__dlpack_device__()[0] == 1:  # kDLCPU of dlpack.h
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

    # -- attributes -------------------------------------------------------------------------------------------------
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

    def is_empty(self) -> bool:
        """Whether there are no dimensions, as in SINGA."""
        return self.shape == ()

    def is_transpose(self) -> bool:
        """False: the elements are always in the order of their indices."""
        return False

    # -- to the host -------------------------------------------------------------------------------------------------
    def to_numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the values, as a NumPy array."""
        return np.array(self.device.host(self.array))

    numpy = to_numpy  # PyTorch's name

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The same, for `numpy.asarray` and NumPy's functions.

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

    def l1(self) -> float:
        """Mean of the absolute values, as in SINGA."""
        return float(np.abs(self.device.host(self.array)).mean(dtype=float64))

    def l2(self) -> float:
        """Euclidean norm divided by the number of elements, as in SINGA."""
        return float(np.sqrt(np.square(self.device.host(self.array), dtype=float64).sum())) / self.size()

    def __float__(self) -> float:
        return float(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __bool__(self) -> bool:
        """The truth of one element; of several it is unknown, so that `a == b` cannot be taken for one answer."""
        if self.size() != 1:
            raise UsageError(
                f"a tensor of shape {self.shape} is neither true nor false; compare it by `is`, or its to_numpy()"
            )
        return bool(self.item())

    # -- overwriting -------------------------------------------------------------------------------------------------
    def changed(self) -> Self:
        """Local. Report a change in place; return this tensor.

        The replay of a recorded step would not repeat it, and a graph may need the old values.
        """
        if mode.ran is not None:
            mode.ran.append("a tensor is changed in place")
        changes.changed(self.array)
        return self

    def copy_from_numpy(self, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        """Overwrite the values with those of `array`, converted to this tensor's dtype.

        Args:
            array: any shape.
            offset: index of the first element to overwrite; 0 needs an array of the tensor's size.

        Raises:
            UsageError: the sizes do not fit.
        """
        check_unmasked(array)
        array = np.asarray(array)
        offset = check_integer("offset", offset)
        if offset < 0 or array.size != self.size() - offset:
            raise UsageError(
                f"an array of shape {array.shape} does not fill a tensor of shape {self.shape} from element {offset}"
            )
        source = self.device.xp.asarray(array, dtype=self.dtype)
        self.changed().array.reshape(-1)[offset:] = source.reshape(-1)

    def copy_data(self, other: Values) -> None:
        """Overwrite the values with those of `other`, a tensor of the same size on any device."""
        self.copy_from_numpy(other.device.host(other.array))

    def copy_from(self, source: Values | np.ndarray[Any, Any], offset: int = 0) -> None:
        """As `copy_data` from a tensor, as `copy_from_numpy` from an array."""
        self.copy_from_numpy(source.device.host(source.array) if isinstance(source, Values) else source, offset)

    def set_value(self, value: float) -> Self:
        """Overwrite every element with `value`; return this tensor.

        Raises:
            UsageError: the elements cannot hold it.
        """
        try:
            self.array.fill(value)
        except (OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"elements of {self.dtype} cannot hold {value!r} ({error}); convert by to_type") from None
        return self.changed()

    def gaussian(self, mean: float = 0.0, std: float = 1.0) -> Self:
        """Overwrite the values with normal random numbers from the device's `host_rng`; return this tensor."""
        return self._draw("standard_normal", std, mean)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Self:
        """Overwrite the values with random numbers in [low, high) from the device's `host_rng`; return this tensor."""
        return self._draw("random", high - low, low)

    def bernoulli(self, p: float) -> Self:
        """Overwrite each element with 1 with probability `p`, else 0, from the device's `host_rng`; return this."""
        draw = self.device.host_rng.random(self.shape, dtype=float32) < p
        self.changed().array[...] = self.device.xp.asarray(draw)
        return self

    def _draw(self, method: str, scale: float, shift: float) -> Self:
        # float16 is rounded from float32, for NumPy draws no float16.
        dtype = np.dtype(float64 if self.dtype == float64 else float32)
        draw = getattr(self.device.host_rng, method)(self.shape, dtype=dtype)
        self.changed().array[...] = self.device.xp.asarray(draw * dtype.type(scale) + dtype.type(shift))
        return self

    def reset_like(self, other: Values) -> None:
        """Become zeros of the shape, dtype and device of `other`."""
        self.array, self.device = other.device.xp.zeros(other.shape, other.dtype), other.device
        self.changed()

    def to_type(self, dtype: DTypeLike) -> Self:
        """Convert the values to `dtype`, in new memory; return this tensor. "float" is float32, "int" int32.

        Raises:
            UsageError: there is no such type.
        """
        self.array = self.array.astype(_type(dtype))
        return self.changed()

    def to_device(self, device: Device) -> None:
        """Move the values to `device`."""
        if device is not self.device:
            self.array, self.device = device.xp.asarray(self.device.host(self.array)), device
            self.changed()

    def to_host(self) -> None:
        """Move the values to the CPU."""
        self.to_device(get_default_device())

    # -- new tensors -------------------------------------------------------------------------------------------------
    def copy(self) -> Self:
        """A new tensor that shares the memory of this one, outside the graph, as in SINGA."""
        return self.of(self.array, self.device)

    def clone(self) -> Self:
        """A new tensor with the same values in memory of its own, outside the graph; no parameter even if this is."""
        return self.of(self.array.copy(), self.device)

    deepcopy = contiguous = clone

    def as_type(self, dtype: DTypeLike) -> Self:
        """A new tensor with the values converted to `dtype`, outside the graph. "float" is float32, "int" int32.

        Raises:
            UsageError: there is no such type.
        """
        return self.of(self.array.astype(_type(dtype)), self.device)


_NARROW: dict[Any, DTypeLike] = {np.dtype(float64): float32, np.dtype(int64): int32, np.dtype(bool): int32}


def _narrow(data: Any) -> DTypeLike:
    """The type in which SINGA keeps values of the type of `data`: 64-bit numbers become 32-bit ones, if they fit."""
    dtype = data.dtype if hasattr(data, "dtype") else np.asarray(data).dtype
    if dtype.kind not in "biuf":
        raise UsageError(f"a tensor holds numbers, not {dtype}")
    if dtype.char == "d" and hasattr(data, "dtype"):  # Python's numbers have no other type
        tell_once("float64 data becomes float32, as in SINGA; dtype=tensor.float64 keeps it")
    if dtype == np.int64 and np.size(data) and not -(2**31) <= np.min(data) <= np.max(data) < 2**31:
        return dtype
    return _NARROW.get(dtype, dtype)


def _type(dtype: DTypeLike) -> np.dtype[Any]:
    """The type of that name; "float" and "int" are those of SINGA, where NumPy's are of 64 bits."""
    try:
        return np.dtype({"float": "float32", "int": "int32"}.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        raise UsageError(f"{dtype!r} is not an element type; tensor.float32, for example, is one") from None


def c_contiguous(array: Array) -> Array:
    """Local. `array` itself.

    Raises:
        UsageError: it is strided.
    """
    if not array.flags.c_contiguous:
        raise UsageError("a tensor cannot use a strided array; pass a contiguous one (numpy.ascontiguousarray)")
    return array
