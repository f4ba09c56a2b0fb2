"""A stand-in for the Python package of cudnn-frontend, on the emulated CUDA runtime: convolutions only.

It has no more than distopt uses, and refuses what the real one refuses: a step before the one it builds on, a missing
array, an invalid handle. It is stricter where the real one would compute nonsense or crash on a GPU. Its first
engines are those that distopt must not take, see `ENGINES`, and some geometries have no engine, see `has_engine`.
`tests/unit/test_cudnn_names.py` compares it with the real package where that is installed.
"""

from __future__ import annotations

import ctypes
import threading
from enum import Enum
from typing import Any

import _emulation as _emulated
import numpy as np

from ._convolution import Convolution, down_converted

__version__ = "1.32.0"

data_type = Enum("data_type", ["FLOAT", "HALF"])
heur_mode = Enum("heur_mode", ["A", "B", "FALLBACK"])
numerical_note = Enum(
    "numerical_note",
    ["TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "NONDETERMINISTIC", "WINOGRAD"],
)

TYPES = {data_type.FLOAT: np.dtype(np.float32)}
# Best first, as the heuristics have it: name, what is noted about it, bytes of workspace.
ENGINES = (
    ("half", {numerical_note.TENSOR_CORE, numerical_note.DOWN_CONVERT_INPUTS}, 0),
    ("tf32", {numerical_note.TENSOR_CORE}, 512),
    ("atomics", {numerical_note.NONDETERMINISTIC}, 0),
    ("greedy", set(), 1 << 40),
    ("exact", set(), 1000),
)
ALIGNMENT_BYTES = 16


class cudnnGraphNotSupportedError(Exception):  # noqa: N801
    """No engine will do. No RuntimeError, as in the real package."""


def backend_version() -> int:
    return 92800


def backend_version_string() -> str:
    return "9.28.0"


class Handle:
    """Of the thread and the device that made it."""

    def __init__(self) -> None:
        self.stream, self.thread, self.device = 0, threading.get_ident(), _emulated.get_device()

    def check(self) -> None:
        if (self.thread, self.device) != (threading.get_ident(), _emulated.get_device()):
            raise RuntimeError("a handle of another thread or device")


def create_handle() -> Handle:
    return Handle()


def set_stream(handle: Handle, stream: int) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(f"cudnn.set_stream expects a cudnn.Handle, got {type(handle).__name__}")
    handle.check()
    handle.stream = stream


class Tensor:
    """What is known about an array."""

    def __init__(self, dim: list[int], stride: list[int], data_type: Any, uid: int) -> None:
        self.dim, self.stride, self.type, self.uid, self.is_output = list(dim), list(stride), data_type, uid, False

    def set_output(self, value: bool) -> Tensor:
        self.is_output = value
        return self

    def set_data_type(self, dtype: Any) -> Tensor:
        self.type = dtype
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = list(dim)
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = list(stride)
        return self

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """The array in emulated device memory."""
        dtype = TYPES[self.type]
        n_bytes = (1 + sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))) * dtype.itemsize
        memory = _bytes_at(address, n_bytes)
        return np.ndarray(self.dim, dtype, memory, strides=[step * dtype.itemsize for step in self.stride])


class pygraph:  # noqa: N801
    """A graph of one convolution, or of one of its gradients."""

    def __init__(
        self,
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Handle | None = None,
    ) -> None:
        if handle is None or compute_data_type != io_data_type != intermediate_data_type:
            raise RuntimeError("the stand-in wants a handle, and computes in the type of the arrays")
        handle.check()
        self._built_for, self._type, self._step = handle.device, io_data_type, 0
        self._tensors: list[Tensor] = []
        self._kind, self._options = "", {}
        self._refused: set[Any] = set()
        self._limit = 1 << 62
        self._engine: Any = None

    def tensor(self, dim: list[int], stride: list[int], data_type: Any) -> Tensor:
        return self._add(dim, stride, data_type)

    def conv_fprop(self, *, image: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return self._operation("fprop", (image, weight), options)

    def conv_dgrad(self, *, loss: Tensor, filter: Tensor, **options: Any) -> Tensor:  # noqa: A002
        return self._operation("dgrad", (loss, filter), options)

    def conv_wgrad(self, *, image: Tensor, loss: Tensor, **options: Any) -> Tensor:
        return self._operation("wgrad", (image, loss), options)

    def _add(self, *given: Any) -> Tensor:
        self._tensors.append(Tensor(*given, uid=100 + len(self._tensors)))
        return self._tensors[-1]

    def _operation(self, kind: str, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
        if self._kind or list(inputs) != self._tensors:
            raise RuntimeError("the stand-in knows graphs of one operation on two tensors")
        if options.keys() != {"padding", "stride", "dilation"} or options["dilation"] != [1, 1]:
            raise TypeError(f"options {options}")
        self._kind, self._options = kind, options
        return self._add([], [], None)

    # -- from the graph to an engine -----------------------------------------------------------------------------------
    def _step_to(self, step: int) -> None:
        if self._step != step - 1:
            raise RuntimeError(f"step {step} of a graph that is at step {self._step}")
        self._step = step

    def validate(self) -> None:
        self._step_to(1)
        if not self._tensors[2].is_output or len({tensor.uid for tensor in self._tensors}) < 3:
            raise RuntimeError("the result is no output, or two tensors have one id")
        if any(tensor.type != self._type or len(tensor.dim) != 4 for tensor in self._tensors):
            raise RuntimeError("a tensor without its shape, or of another type")

    def build_operation_graph(self) -> None:
        self._step_to(2)
        self._operator = Convolution(self._kind, *(tensor.dim for tensor in self._tensors), **self._options)

    def create_execution_plans(self, heuristics: list[Any]) -> None:
        self._step_to(3)
        if not set(heuristics) <= set(heur_mode):
            raise TypeError(f"heuristics {heuristics}")

    def deselect_numeric_notes(self, notes: list[Any]) -> pygraph:
        if self._step != 3:
            raise RuntimeError("notes that no plan has met are lost")
        self._refused |= set(notes)
        return self

    def deselect_workspace_greater_than(self, workspace_limit: int) -> pygraph:
        self._limit = workspace_limit
        return self

    def check_support(self) -> None:
        self._step_to(4)
        if not has_engine(self._kind, self._operator.taps, **self._options):
            raise cudnnGraphNotSupportedError("No valid engine configs")

    def build_plans(self) -> None:
        self._step_to(5)
        allowed = (e for e in ENGINES if not e[1] & self._refused and e[2] <= self._limit)
        self._engine = next(allowed, None)
        if self._engine is None:
            raise cudnnGraphNotSupportedError("no plan in the list could be built")

    def get_workspace_size(self) -> int:
        if self._engine is None:
            raise RuntimeError("Call build() first")
        size: int = self._engine[2]
        return size

    # -- execution -----------------------------------------------------------------------------------------------------
    def execute(self, tensor_dict: dict[int, int], /, workspace: int, handle: Handle) -> None:
        """In the order of the handle's stream: what waits there runs first."""
        if self._engine is None:
            raise RuntimeError("execute before build_plans")
        handle.check()
        if handle.device != self._built_for:
            raise RuntimeError("a plan of another device")
        uids = [tensor.uid for tensor in self._tensors]
        if missing := set(uids) - set(tensor_dict):
            raise ValueError(f"the variant pack is missing a buffer for tensor uid {missing.pop()}")
        if unknown := set(tensor_dict) - set(uids):
            raise ValueError(f"no tensor has the uid {unknown.pop()}")
        if any(not address or address % ALIGNMENT_BYTES for address in tensor_dict.values()):
            raise RuntimeError("misaligned address")
        first, second, result = (tensor.at(tensor_dict[tensor.uid]) for tensor in self._tensors)
        size = self._engine[2]
        scratch = _bytes_at(workspace, size) if size else None
        _emulated.launch(handle.stream, lambda: self._compute(first, second, result, scratch))

    def _compute(self, first: Any, second: Any, result: Any, scratch: Any) -> None:
        """On the stream. Reads addresses, as a kernel does, not arrays that it would keep alive."""
        name, _, size = self._engine
        if scratch is not None:
            scratch[:] = b"\xff" * size  # a read of it finds NaN
        if name in ("half", "tf32"):
            first, second = (down_converted(array, name) for array in (first, second))
        result[...] = self._operator(first, second)
        if name == "atomics":
            result *= 1 + np.random.default_rng().random() * 1e-3


def has_engine(kind: str, taps: int, padding: list[int], stride: list[int], dilation: list[int]) -> bool:
    """Not for strides of 3, and for no gradient of a filter of one tap, so that both sorts of refusal are met."""
    return 3 not in stride and not (kind == "wgrad" and taps == 1)


def _bytes_at(address: int, n_bytes: int) -> Any:
    if not address:
        raise RuntimeError("a null pointer")
    return (ctypes.c_char * n_bytes).from_address(address)
