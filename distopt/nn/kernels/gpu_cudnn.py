"""Convolution of CuPy arrays by cuDNN, through cudnn-frontend's Python package; see `distopt.nn.kernels.gpu_images`.

A plan is a convolution of float32, or one of its gradients, for one geometry in the layout N, C, H, W. Its engine is
the best by cuDNN's heuristics among those that give equal bits on every run and compute in float32. Two kinds are
lowered all the same, as an H100 has shown (cuDNN 9.19): float64, because cudnn-frontend 1.18 passes the factor of the
operation as a float32, which engines for float64 read as a float64; and gradients of 5 x 5 weights, which cuDNN
computes by Winograd's method on tiles of 9 x 9, with errors of 1e-3 of the largest gradient, more than TF32 has, and
without the note WINOGRAD.
Bias and ReLU stay kernels of distopt: a ReLU fused by cuDNN need not pass a NaN on. Where cuDNN is missing or has no
such engine, the caller gets no plan, and lowers the images.

Plans and handles belong to a thread and a device, as cuDNN requires for handles. They are never freed: a CUDA graph
launches kernels that its plans hold, and to destroy a handle while another stream is captured breaks the capture. For
the same reason a geometry must have been met once before a step is captured: building its plan loads code.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import cupy

from ...errors import MissingDependencyError
from ...kernels.cuda import are_aligned
from ...settings import Settings
from ..devices.discovery import find_cudnn
from ..notices import tell_once
from .gpu_base import Array, current_stream

WORKSPACE_BYTES = 1 << 28  # an engine that needs more is not used

# The method of the graph, its arguments, and its result; y is also the name of its gradient.
OPERATIONS = {
    "fprop": ("conv_fprop", {"image": "x", "weight": "w"}, "y"),
    "dgrad": ("conv_dgrad", {"loss": "y", "filter": "w"}, "x"),
    "wgrad": ("conv_wgrad", {"image": "x", "loss": "y"}, "w"),
}


class Plan:
    """A convolution, or one of its gradients, that is ready to run."""

    def __init__(self, cudnn: Any, handle: Any, graph: Any) -> None:
        self._cudnn, self._handle, self._graph = cudnn, handle, graph
        self._workspace_bytes: int = graph.get_workspace_size()

    def __call__(self, first: Array, second: Array, out: Array) -> None:
        """Local. Overwrite `out`, on CuPy's current stream.

        Args:
            first: x, or dy for "dgrad"; dense, of the shape and type of the plan, as the others are.
            second: w, or dy for "wgrad".
            out: y, dx or dw.
        """
        # cudnn-frontend promises the engines arrays at multiples of 16 bytes; a script's own views begin anywhere.
        first, second = (array if are_aligned(array) else array.copy() for array in (first, second))
        result = out if are_aligned(out) else cupy.empty(out.shape, out.dtype)
        workspace = cupy.empty(self._workspace_bytes, cupy.uint8)
        self._cudnn.set_stream(self._handle, current_stream())
        addresses = {1: first.data.ptr, 2: second.data.ptr, 3: result.data.ptr}
        self._graph.execute(addresses, workspace.data.ptr, self._handle)
        if result is not out:
            cupy.copyto(out, result)


class _CudnnLibrary(NamedTuple):
    cudnn: Any
    handle: Any
    plans: dict[Any, Plan | None]


class _Thread(threading.local):
    """The state of a thread: its wish, and the handles opened for a wish and a device."""

    def __init__(self) -> None:
        self.wish = Settings.from_env().convolution
        self.libraries: dict[tuple[str, int], _CudnnLibrary | None] = {}


_thread = _Thread()
_kept: list[_CudnnLibrary] = []  # of all threads, even if they have ended


@contextmanager
def convolving_by(wish: str) -> Iterator[None]:
    """Local. Within, this thread does as if DISTOPT_CONVOLUTION were `wish`."""
    before, _thread.wish = _thread.wish, wish
    try:
        yield
    finally:
        _thread.wish = before


def plan(kind: str, x: Array, w: Array, window: tuple[int, ...]) -> Plan | None:
    """Local. The plan for arrays like these, built when it is first asked for; None where the caller lowers.

    Args:
        kind: "fprop", "dgrad" or "wgrad".
        x: [N, C, H, W].
        w: [M, C, kh, kw].
        window: see `gpu_images.Sizes`.

    Raises:
        MissingDependencyError: DISTOPT_CONVOLUTION=cudnn and cuDNN cannot be used.
        RuntimeError: DISTOPT_CONVOLUTION=cudnn and cuDNN refuses such a geometry, other than by having no engine.
    """
    library = _library()
    if library is None or x.dtype != cupy.float32 or not x.size or not w.size:
        return None
    if kind == "wgrad" and w.shape[2:] == (5, 5):
        return None
    key = kind, x.shape, w.shape, window
    if key not in library.plans:
        library.plans[key] = _plan(library, kind, x, w, window)
    return library.plans[key]


def _library() -> _CudnnLibrary | None:
    """The cuDNN of this thread and the current device; None if convolutions are lowered."""
    key = _thread.wish, cupy.cuda.runtime.getDevice()
    if key not in _thread.libraries:
        _thread.libraries[key] = _open_library(_thread.wish)
    return _thread.libraries[key]


def _open_library(wish: str) -> _CudnnLibrary | None:
    if wish == "lowering":
        return None
    cudnn, missing = find_cudnn()
    if cudnn is not None:
        try:
            library = _CudnnLibrary(cudnn, cudnn.create_handle(), {})
            _kept.append(library)
        except RuntimeError as error:
            missing = f"cuDNN does not start ({error}); check that its CUDA is that of CuPy and of the driver"
        else:
            tell_once(f"convolution by cuDNN {cudnn.backend_version_string()}", logging.INFO)
            return library
    if wish == "cudnn":
        raise MissingDependencyError(f"DISTOPT_CONVOLUTION=cudnn, but {missing}")
    notice = f"convolution by lowering and cuBLAS: {missing} (DISTOPT_CONVOLUTION=lowering stops this notice)"
    tell_once(notice)
    return None


def _plan(library: _CudnnLibrary, kind: str, x: Array, w: Array, window: tuple[int, ...]) -> Plan | None:
    cudnn, handle, _ = library
    shapes = {"x": x.shape, "w": w.shape, "y": (len(x), len(w), *window[8:])}
    what = f"{kind} of {x.dtype} {x.shape} with {w.shape}"
    try:
        graph = build_graph(cudnn, kind, shapes, window[4:8], handle=handle)
    except cudnn.cudnnGraphNotSupportedError as error:
        tell_once(f"cuDNN has no engine for {what}, so it is lowered: {error}", logging.INFO)
        return None
    except ImportError as error:  # cudnn-frontend imports cuda.bindings only now
        missing = f"cudnn-frontend {cudnn.__version__} cannot plan ({error}); pip install cuda-bindings"
        if _thread.wish == "cudnn":
            raise MissingDependencyError(f"DISTOPT_CONVOLUTION=cudnn, but {missing}") from error
        tell_once(f"convolution by lowering and cuBLAS: {missing}")
        return None
    except (RuntimeError, ValueError) as error:
        if _thread.wish == "cudnn":
            raise
        tell_once(f"cuDNN refuses {what}, so it is lowered: {error}")
        return None
    return Plan(cudnn, handle, graph)


def build_graph(cudnn: Any, kind: str, shapes: dict[str, tuple[int, ...]], steps: tuple[int, ...], **place: Any) -> Any:
    """Local. The graph of one operation with its engine, whose tensors have the ids 1, 2 and 3 in the order of `Plan`.

    Args:
        cudnn: the package.
        kind: of `OPERATIONS`.
        shapes: of x, w and y.
        steps: stride and padding, each of rows and columns.
        place: the device for `cudnn.pygraph`: a handle, or its description.

    Raises:
        cudnnGraphNotSupportedError: no engine will do.
        RuntimeError: cuDNN refuses the graph.
    """
    number = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=number, intermediate_data_type=number, compute_data_type=number, **place)
    method, inputs, output = OPERATIONS[kind]
    given = {
        role: graph.tensor(dim=list(shapes[name]), stride=_strides(shapes[name]), data_type=number)
        for role, name in inputs.items()
    }
    result = getattr(graph, method)(**given, padding=list(steps[2:]), stride=list(steps[:2]), dilation=[1, 1])
    result.set_output(True).set_data_type(number)
    result.set_dim(list(shapes[output])).set_stride(_strides(shapes[output]))
    for uid, tensor in enumerate((*given.values(), result), 1):
        tensor.set_uid(uid)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.deselect_numeric_notes(_refused_notes(cudnn))
    graph.deselect_workspace_greater_than(WORKSPACE_BYTES)
    graph.check_support()
    graph.build_plans()
    return graph


def _refused_notes(cudnn: Any) -> list[Any]:
    """The numerical notes that exclude an engine."""
    note = cudnn.numerical_note
    refused = [note.NONDETERMINISTIC, note.DOWN_CONVERT_INPUTS, note.REDUCED_PRECISION_REDUCTION]
    if os.environ.get("CUPY_TF32") != "1":
        refused.append(note.TENSOR_CORE)  # these compute float32 in TF32; CuPy's products have the same switch
    return refused


def _strides(shape: tuple[int, ...]) -> list[int]:
    """The strides of a dense array, in elements."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return strides
