"""The array of the stand-in: NumPy's, with the rules of CuPy about what may meet what."""

from __future__ import annotations

import ctypes
import functools
import operator
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import cuda

# The operations below wait for the current stream, then compute at once.
METHODS = (
    *("all", "any", "argmax", "astype", "clip", "copy", "flatten", "max", "mean", "min", "nonzero", "ravel", "repeat"),
    *("reshape", "squeeze", "sum", "swapaxes", "take", "transpose", "var", "view"),
)
BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift"),
    *("lt", "le", "eq", "ne", "gt", "ge"),
)
IN_PLACE = (*("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"),)


# DLPack's kind of such devices, and its only device of the host.
DLPACK_CUDA, DLPACK_CPU = 2, (1, 0)

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes, _pointer_of.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_size_t


def _on(capsule: Any, device: tuple[int, int]) -> Any:
    """The capsule of an array, which says then that it is on this device: two int32 behind an address."""
    address = _pointer_of(capsule, b"dltensor")
    ctypes.cast(address + 8, ctypes.POINTER(ctypes.c_int32 * 2)).contents[:] = device
    return capsule


class ndarray:  # noqa: N801
    """See the module. `_host` is a NumPy view of the emulated device memory."""

    __hash__ = None  # type: ignore[assignment]
    _memory: cuda.BaseMemory
    _host: np.ndarray[Any, Any]
    base: ndarray | None = None  # the array whose view it is

    def __init__(self, shape: Any, dtype: Any = float) -> None:
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        n_bytes = np.dtype(dtype).itemsize * prod(shape)
        pointer = cuda.alloc(n_bytes)
        self._memory = pointer.mem
        self._host = np.ndarray(shape, dtype, cuda.host_bytes(pointer, n_bytes))

    @classmethod
    def _from(cls, host: np.ndarray[Any, Any], source: ndarray) -> ndarray:
        array = object.__new__(cls)  # a view: the constructor would allocate memory on the device
        array._host, array._memory = host, source._memory
        array.base = source if source.base is None else source.base
        return array

    # -- properties ------------------------------------------------------------------------------------------------
    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    size = property(lambda self: self._host.size)
    ndim = property(lambda self: self._host.ndim)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: SimpleNamespace(c_contiguous=self._host.flags.c_contiguous))
    T = property(lambda self: self.transpose())
    device = property(lambda self: cuda.Device(self._memory.device_id))

    @property
    def data(self) -> cuda.MemoryPointer:
        """Where the first element is."""
        return cuda.MemoryPointer(self._memory, self._host.ctypes.data - self._memory.ptr)

    # -- to the host and back ----------------------------------------------------------------------------------------
    def get(self, stream: Any = None, *, out: Any = None, blocking: bool = True) -> np.ndarray[Any, Any]:
        """A copy in host memory. Not blocking, it is complete only when the stream is."""
        if blocking:
            cuda.host_waits.append("get")
        if out is None:
            cuda.drain(stream)
            return np.array(self._host, order="C")
        if not isinstance(out, np.ndarray) or out.dtype != self.dtype or out.shape != self.shape:
            raise TypeError("Only numpy.ndarray of the same shape and dtype can be obtained from cupy.ndarray")
        if not (out.flags.c_contiguous and self._host.flags.c_contiguous):
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        cuda.copy_async(out.ctypes.data, self._host.ctypes.data, self.nbytes, stream)
        if blocking:
            cuda.drain(stream)
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        """Overwrite by a NumPy array of the same shape and dtype; asynchronous from pinned memory."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self._host.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        arr = np.ascontiguousarray(arr)
        cuda.copy_async(self._host.ctypes.data, arr.ctypes.data, self.nbytes, stream)
        if not cuda.is_pinned(arr):
            cuda.drain(stream)

    def item(self) -> Any:
        cuda.host_waits.append("item")
        cuda.drain()
        return self._host.item()

    def tolist(self) -> Any:
        cuda.host_waits.append("tolist")
        cuda.drain()
        return self._host.tolist()

    def fill(self, value: Any) -> None:
        own, value = self._host, host(value)
        cuda.run(lambda: own.fill(value))

    def __len__(self) -> int:
        return len(self._host)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def __dlpack__(self, **_: Any) -> Any:
        interface = {"__array_interface__": self._host.__array_interface__, "keeps": self}
        return _on(np.asarray(SimpleNamespace(**interface)).__dlpack__(), self.__dlpack_device__())

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CUDA, self._memory.device_id

    @classmethod
    def _of_others(cls, source: Any) -> ndarray:
        """A view of an array of another library on the device, by DLPack."""
        capsule = _on(source.__dlpack__(), DLPACK_CPU)
        seen = np.from_dlpack(SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: DLPACK_CPU))
        address, array = seen.ctypes.data, object.__new__(cls)
        memory = (ctypes.c_char * max(seen.nbytes, 1)).from_address(address) if seen.size else bytearray(1)
        array._host = np.ndarray(seen.shape, seen.dtype, memory, strides=seen.strides)  # one that may be written
        array._memory = cuda.Foreign(address, seen.nbytes, source.__dlpack_device__()[1], seen)
        return array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or ufunc.signature is not None:
            return NotImplemented
        return call(ufunc, *inputs, **options)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"numpy.{func.__name__} was called on a CuPy array; use the array module of the device")

    # -- elements ----------------------------------------------------------------------------------------------------
    def __getitem__(self, key: Any) -> Any:
        return call(operator.getitem, self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        own, key, value = self._host, host(key), host(value)
        cuda.run(lambda: operator.setitem(own, wrapped(own.shape, key), value))

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __neg__(self) -> Any:
        return call(operator.neg, self)

    def __abs__(self) -> Any:
        return call(abs, self)

    def __invert__(self) -> Any:
        return call(operator.invert, self)


def host(value: Any) -> Any:
    """`value` with the NumPy views of its arrays; a NumPy array is refused, as CuPy does."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, (list, tuple)):
        return type(value)(host(item) for item in value)
    return value


def device(value: Any, *sources: Any) -> Any:
    """Arrays of `value` on the device: a view of one of the arrays `sources` where it is one, else new memory."""
    if isinstance(value, (list, tuple)):
        return type(value)(device(item, *sources) for item in value)
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    if (view := _view(value, sources)) is not None:
        return view
    value = np.asarray(value)
    result = ndarray(value.shape, value.dtype)
    # Memory from the pool may still be written by those who had it before.
    cuda.run(lambda own=result._host: operator.setitem(own, ..., value))
    return result


def wrapped(shape: tuple[int, ...], key: Any) -> Any:
    """`key`, with arrays of integers modulo the length of their dimension: CuPy raises no IndexError for them."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if not any(isinstance(k, np.ndarray) for k in keys):
        return key
    if any(k is None or k is ... for k in keys):
        raise NotImplementedError("the stand-in takes arrays of indices beside slices and numbers only")
    axis = 0
    for i, k in enumerate(keys):
        mask = isinstance(k, np.ndarray) and k.dtype == bool
        if isinstance(k, np.ndarray) and not mask and shape[axis]:
            keys[i] = k % shape[axis]
        axis += k.ndim if mask else 1
    return tuple(keys) if isinstance(key, tuple) else keys[0]


def _take(a: Any, indices: Any, axis: Any = None, **options: Any) -> Any:
    length = a.size if axis is None else a.shape[axis]
    return np.take(a, indices % length if length else indices, axis, **options)


# Functions of NumPy that raise an IndexError, as CuPy has them.
WRAPPING: dict[Any, Any] = {
    operator.getitem: lambda a, key: a[wrapped(a.shape, key)],
    np.take: _take,
    np.ndarray.take: _take,
    np.add.at: lambda a, indices, b: np.add.at(a, wrapped(a.shape, indices), b),
}


def _view(value: Any, sources: Any) -> ndarray | None:
    if isinstance(value, np.ndarray):
        for source in sources:
            if isinstance(source, (list, tuple)):
                source = next((s for s in source if isinstance(s, ndarray) and s._memory.holds(value)), None)
            if isinstance(source, ndarray) and source._memory.holds(value):
                return ndarray._from(value, source)
    return None


def call(function: Any, *args: Any, **options: Any) -> Any:
    """`function` of NumPy, on arrays of the device."""
    out = options.get("out")
    if out is not None and not isinstance(out, ndarray):
        raise TypeError("return arrays must be of ArrayType")
    own = WRAPPING.get(function, function)
    task = functools.partial(own, *map(host, args), **{key: host(value) for key, value in options.items()})
    if cuda.deferring():
        return _deferred(function, task, args, out)
    cuda.drain()
    result = task()
    return out if out is not None else device(result, *args)


def _deferred(function: Any, task: Any, args: Any, out: ndarray | None) -> Any:
    """As `call`, where the current stream records or lags: views are made now, and all else at each launch."""
    name = getattr(function, "__name__", "")
    if name in ("dot", "matmul") and cuda.capturing():
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    if name == "nonzero" or (name == "getitem" and getattr(args[1], "dtype", np.dtype(int)).kind == "b"):
        cuda.drain()  # the size of the result is read from the device, which raises in a recording
    if out is not None or function in (np.copyto, np.add.at):
        cuda.run(task)
        return out
    with np.errstate(all="ignore"):
        result = task()  # of rubbish; it tells the shape
    several = isinstance(result, (list, tuple))
    made: list[tuple[int, np.ndarray[Any, Any]]] = []
    arrays = []
    for i, value in enumerate(result if several else [result]):
        if (view := _view(value, args)) is not None:
            arrays.append(view)
        else:
            arrays.append(ndarray(value.shape, value.dtype))
            made.append((i, arrays[-1]._host))

    def again() -> None:
        anew = task()
        for i, own in made:
            own[...] = anew[i] if several else anew

    if made:
        cuda.run(again)
    return type(result)(arrays) if several else arrays[0]


def _method(name: str) -> Any:
    def method(self: ndarray, *args: Any, **options: Any) -> Any:
        return call(getattr(np.ndarray, name), self, *args, **options)

    return method


def _operator(name: str, *, swapped: bool = False) -> Any:
    function = getattr(operator, name)

    def method(self: ndarray, other: Any) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, np.generic, int, float, bool)):
            return NotImplemented
        return call(function, other, self) if swapped else call(function, self, other)

    return method


def _in_place(name: str) -> Any:
    function = getattr(operator, f"i{name.removesuffix('_')}")

    def method(self: ndarray, other: Any) -> ndarray:
        own, other = self._host, host(other)
        cuda.run(lambda: function(own, other))
        return self

    return method


for _name in METHODS:
    setattr(ndarray, _name, _method(_name))
for _name in BINARY:
    _plain = _name.removesuffix("_")
    setattr(ndarray, f"__{_plain}__", _operator(_name))
    if _name not in ("lt", "le", "eq", "ne", "gt", "ge"):
        setattr(ndarray, f"__r{_plain}__", _operator(_name, swapped=True))
for _name in IN_PLACE:
    setattr(ndarray, f"__i{_name.removesuffix('_')}__", _in_place(_name))
