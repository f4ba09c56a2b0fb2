"""Arrays on devices: what they hold, how it comes to the host, and how it is overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from ...checks import check_integer
from ...errors import UsageError
from ...kernels import check_unmasked
from ..devices.device import Device, device_of, get_default_device
from . import changes
from .array import Array, c_contiguous, check_numbers, element_type, float32, float64, narrowed
from .raw import RawTensor, raw

Self = TypeVar("Self", bound="DeviceArray")


class DeviceArray:
    """The base of `Tensor`: an array on a device, outside of any graph.

    Attributes:
        array: the values, a C-contiguous NumPy or CuPy array. It may be changed in place.
        device: the device that holds `array`.
    """

    __slots__ = ("array", "device")
    array: Array
    device: Device

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
            tensor = isinstance(data, DeviceArray)
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

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    # -- attributes ----------------------------------------------------------------------------------------------------
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
        """Whether the tensor has zero dimensions, which SINGA calls empty."""
        return self.shape == ()

    def is_transpose(self) -> bool:
        """False: the elements are always in the order of their indices."""
        return False

    # -- to the host ---------------------------------------------------------------------------------------------------
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

    def l1(self) -> float:
        """Mean of the absolute values, as in SINGA."""
        return float(np.abs(self.device.host(self.array)).mean(dtype=float64))

    def l2(self) -> float:
        """Euclidean norm divided by the number of elements, as in SINGA."""
        return float(np.sqrt(np.square(self.device.host(self.array), dtype=float64).sum())) / self.size()

    # -- overwriting ---------------------------------------------------------------------------------------------------
    def changed(self: Self) -> Self:
        """Report that this tensor changes in place, as a graph may need the old values; return it."""
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

    def copy_data(self, other: DeviceArray) -> None:
        """Overwrite the values with those of `other`, a tensor of the same size on any device."""
        self.copy_from(other)

    def copy_from(self, source: DeviceArray | np.ndarray[Any, Any], offset: int = 0) -> None:
        """As `copy_data` from a tensor, as `copy_from_numpy` from an array."""
        self.copy_from_numpy(source.device.host(source.array) if isinstance(source, DeviceArray) else source, offset)

    def set_value(self: Self, value: float) -> Self:
        """Overwrite every element with `value`; return this tensor.

        Raises:
            UsageError: the elements cannot hold it.
        """
        try:
            self.array.fill(value)
        except (OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"elements of {self.dtype} cannot hold {value!r} ({error}); convert by to_type") from None
        return self.changed()

    def gaussian(self: Self, mean: float = 0.0, std: float = 1.0) -> Self:
        """Overwrite the values with normal random numbers from the device's `host_rng`; return this tensor."""
        return self._draw("standard_normal", std, mean)

    def uniform(self: Self, low: float = 0.0, high: float = 1.0) -> Self:
        """Overwrite the values with random numbers in [low, high) from the device's `host_rng`; return this tensor."""
        return self._draw("random", high - low, low)

    def bernoulli(self: Self, p: float) -> Self:
        """Overwrite each element with 1 with probability `p`, else 0, from the device's `host_rng`; return this."""
        draw = self.device.host_rng.random(self.shape, dtype=float32) < p
        self.changed().array[...] = self.device.xp.asarray(draw)
        return self

    def _draw(self: Self, method: str, scale: float, shift: float) -> Self:
        # float16 is rounded from float32, for NumPy draws no float16.
        dtype = np.dtype(float64 if self.dtype == float64 else float32)
        draw = getattr(self.device.host_rng, method)(self.shape, dtype=dtype)
        self.changed().array[...] = self.device.xp.asarray(draw * dtype.type(scale) + dtype.type(shift))
        return self

    def to_type(self: Self, dtype: DTypeLike) -> Self:
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

    def reset_like(self, other: DeviceArray) -> None:
        """Become zeros of the shape, dtype and device of `other`."""
        self.array, self.device = other.device.xp.zeros(other.shape, other.dtype), other.device
        self.changed()
