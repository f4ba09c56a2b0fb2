"""The kernels of GPUs: the sources in this folder, compiled by NVRTC for the current GPU when they are first used.

The machine code is kept where CuPy keeps that of its own kernels, in `$CUPY_CACHE_DIR` or ~/.cupy/kernel_cache. CuPy's
`RawModule` would compile and keep them too, but it adds -ftz=true, which makes zeros of subnormal numbers, so that bits
would differ from the CPU's. Names, template parameters and types of arguments are read from the declarations in the
sources: CuPy passes a Python int as int64 and a float as float64, whatever the kernel takes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import cupy
import numpy as np
from cupy.cuda import nvrtc

from ...errors import MissingDependencyError, UsageError, pip_install
from ...files import atomic_write

Array: TypeAlias = Any  # cupy.ndarray

THREADS = 256  # of a block, unless a kernel says otherwise
GRID_ROWS = 65535  # most blocks of a grid in its second dimension; kernels go round

_log = logging.getLogger("distopt")
_FOLDER = Path(__file__).parent
# As on the CPU no contraction into FMA: the same element-wise bits on both. These kernels wait for memory anyway. The
# last one is for lambdas with a parameter of type auto.
_OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")
# The values of template parameters, by name: a kernel is compiled for every combination.
_VALUES = {
    "T": ("float", "double"),
    "Type": ("Half", "BFloat16"),
    "with_residual": ("false", "true"),
    "unit": ("1", "8"),
    "pass": ("0", "1", "2"),
}
_SCALARS = {
    "int": np.int32,
    "unsigned": np.uint32,
    "size_t": np.uint64,
    "float": np.float32,
    "double": np.float64,
    "bool": np.bool_,
}
# The structs of the sources, field by field, each as long as in C.
_STRUCTS = {
    "Batch": struct.Struct("2i"),
    "Window": struct.Struct("10i"),
    "Source": struct.Struct("3PfPf2P"),
    "Workspace": struct.Struct("5PI0P"),
    "SparseLists": struct.Struct("32P32P32II0P"),
}
_TYPES = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
_KERNEL = re.compile(r"(?:template <([^>]*)>\s+)?__global__ void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\(([^)]*)\)")


class Kernel(NamedTuple):
    """The declaration of a kernel.

    Attributes:
        source: name of its file.
        template: names of its template parameters.
        parameters: types of its parameters.
    """

    source: str
    template: tuple[str, ...]
    parameters: tuple[str, ...]


Function: TypeAlias = "tuple[Any, tuple[Callable[[Any], Any], ...]]"  # of CuPy, and what converts its arguments

_functions: dict[tuple[int, str], Function] = {}  # by device and name


# -- launches ----------------------------------------------------------------------------------------------------------
def launch(name: str, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any) -> None:
    """Local. Enqueue a kernel on CuPy's current stream.

    Args:
        name: with its template arguments, as in "digit<0>".
        grid: in blocks.
        block: in threads.
        arguments: of the kernel; for a pointer an array, an address, or None, and for a struct a tuple of its fields,
            where pointers are addresses.

    Raises:
        MissingDependencyError: it cannot be compiled.
        UsageError: see `check_device`.
    """
    function, converters = _functions.get((cupy.cuda.runtime.getDevice(), name)) or load(name)
    function(grid, block, [convert(value) for convert, value in zip(converters, arguments, strict=True)])


def launch_each(name: str, count: int, *arguments: Any) -> None:
    """Local. Launch one thread for each of `count` elements; nothing if there are none. Beyond a limit threads loop."""
    if count:
        launch(name, (min(blocks(count), 1 << 24),), (THREADS,), *arguments)


def launch_units(name: str, count: int, aligned: bool, *arguments: Any) -> None:
    """Local. Launch a thread for four elements if they are `aligned`, the last argument; else for each one."""
    launch_each(name, count // 4 + count % 4 if aligned else count, *arguments, aligned)


def launch_strided(name: str, items: int, *arguments: Any) -> None:
    """Local. Launch threads that loop over `items`, as many as the device holds at a time."""
    held = _processors(cupy.cuda.runtime.getDevice()) * (2048 // THREADS)
    launch(name, (max(1, min(blocks(items), held)),), (THREADS,), *arguments)


def launch_planes(name: str, planes: int, pixels: int, *arguments: Any) -> None:
    """Local. Launch threads that share the pixels of each plane; nothing for an empty grid."""
    if planes and pixels:
        launch(name, (min(blocks(pixels), 1 << 24), min(planes, GRID_ROWS)), (THREADS,), *arguments)


def launch_rows(name: str, rows: int, *arguments: Any) -> None:
    """Local. Launch a warp for each row; nothing without any."""
    if rows:
        launch(name, (min(blocks(rows, THREADS // 32), GRID_ROWS),), (32, THREADS // 32), *arguments)


def are_aligned(*arrays: Array | None, n_bytes: int = 16) -> bool:
    """Local. Whether all arrays begin at a multiple of `n_bytes`."""
    return all(array is None or array.data.ptr % n_bytes == 0 for array in arrays)


def c_type(array: Array) -> str:
    """Local. The type of the elements of `array` as kernels call it."""
    try:
        return _TYPES[array.dtype]
    except KeyError:
        raise TypeError(f"kernels compute in float32 and float64, not in {array.dtype}; convert by to_type") from None


def blocks(items: int, each: int = THREADS) -> int:
    """Number of blocks of `each` items."""
    return -(-items // each)


@cache
def _processors(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


# -- declarations ------------------------------------------------------------------------------------------------------
@cache
def kernels() -> dict[str, Kernel]:
    """Local. The kernels of all sources, by name."""
    found = {}
    for path in sorted(_FOLDER.glob("*.cu")):
        for template, name, parameters in _KERNEL.findall(path.read_text()):
            names = tuple(item.split()[-1] for item in template.split(",") if item)
            found[name] = Kernel(path.name, names, tuple(_type_of(item) for item in parameters.split(",")))
    return found


def _type_of(declared: str) -> str:
    return "*" if "*" in declared else declared.split()[-2]


def instances(source: str) -> list[str]:
    """Local. The names of all kernels of a source."""
    names = []
    for name, kernel in kernels().items():
        if kernel.source == source:
            chosen = product(*(_VALUES[key] for key in kernel.template))
            names += [f"{name}<{', '.join(each)}>" if each else name for each in chosen]
    return names


def _converter(kind: str, device: int) -> Callable[[Any], Any]:
    """The function that makes an argument for CuPy of one for a parameter of this type."""
    if kind == "*":
        return partial(_pointer, device)
    if kind in _SCALARS:
        return _SCALARS[kind]
    layout = _STRUCTS[kind]
    dtype = np.dtype((np.void, layout.size))
    return lambda fields: np.frombuffer(layout.pack(*fields), dtype)  # CuPy passes arrays of one element by value


def _pointer(device: int, value: Any) -> Any:
    if isinstance(value, cupy.ndarray):
        check_device(value, device)
    elif value is not None and not isinstance(value, int):
        raise TypeError(f"kernels take CuPy arrays and addresses, not {type(value).__name__}")
    return value


def check_device(array: Array, device: int) -> None:
    """Local. Raises a UsageError for an array on another GPU than the current one, which a new thread sets to 0."""
    if array.data.device_id != device:
        raise UsageError(
            f"an array is on GPU {array.data.device_id}, but this thread computes on GPU {device}; call "
            f"cupy.cuda.Device({array.data.device_id}).use() in this thread"
        )


# -- compilation -------------------------------------------------------------------------------------------------------
def load(name: str) -> Function:
    """Local. The kernel of that name on the current device; those that are compiled with it are made ready, too."""
    device, source = cupy.cuda.runtime.getDevice(), kernels()[name.partition("<")[0]].source
    names = instances(source)
    mangled, cubin = _compiled(source, names, f"sm_{cupy.cuda.Device(device).compute_capability}")
    module = cupy.cuda.Module()
    module.load(cubin)
    for each in names:
        base, _, arguments = each.rstrip(">").partition("<")
        kinds = (arguments if kind == "T" else kind for kind in kernels()[base].parameters)
        converters = tuple(_converter(kind, device) for kind in kinds)
        _functions[device, each] = module.get_function(mangled[each]), converters
    return _functions[device, name]


def _compiled(source: str, names: Sequence[str], architecture: str) -> tuple[dict[str, str], bytes]:
    """As `compiled`, from the cache if it is there."""
    key = repr((*_texts(source), sorted(names), architecture, _OPTIONS, nvrtc.getVersion())).encode()
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    path = folder / f"distopt-{_digest(key)}.cubin"
    try:
        head, _, cubin = path.read_bytes().partition(b"\n")
        mangled, digest = json.loads(head)
        if digest == _digest(cubin):
            return mangled, cubin
    except (OSError, ValueError):  # it is not there, may not be read, or is damaged
        pass
    result, cubin, _ = compiled(source, names, architecture)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(json.dumps([result, _digest(cubin)]).encode() + b"\n" + cubin)
    except OSError as error:
        _log.warning("compiled kernels cannot be kept, so every process compiles them (%s); set CUPY_CACHE_DIR", error)
    return result, cubin


def compiled(
    source: str, names: Sequence[str], architecture: str, options: Sequence[str] = ()
) -> tuple[dict[str, str], bytes, str]:
    """Local. Compile kernels of a source. Needs NVRTC, and no GPU.

    Args:
        source: name of the file.
        names: of `instances`.
        architecture: as in "sm_90".
        options: more options for NVRTC.

    Returns:
        The names that the kernels have in the machine code; the code; and what NVRTC says.

    Raises:
        MissingDependencyError: it fails; the message has the errors of NVRTC, with file and line.
    """
    text, headers = _texts(source)
    program = nvrtc.createProgram(text, source, [*headers.values()], [*headers])
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        nvrtc.compileProgram(program, (*_OPTIONS, f"-arch={architecture}", *options))
        mangled = {name: nvrtc.getLoweredName(program, name) for name in names}
        return mangled, nvrtc.getCUBIN(program), _log_of(program)
    except nvrtc.NVRTCError as error:
        major, minor = nvrtc.getVersion()
        raise MissingDependencyError(
            f"{source} cannot be compiled for {architecture} by NVRTC of CUDA {major}.{minor} with CuPy "
            f"{cupy.__version__} ({error}): {_log_of(program)}\nThe kernels need compute capability 8.0 or later, and "
            f"an NVRTC that knows the GPU: {pip_install(f'cuda{major}')}"
        ) from None
    finally:
        nvrtc.destroyProgram(program)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _texts(source: str) -> tuple[str, dict[bytes, bytes]]:
    """The text of a source, and by name the headers that it may include."""
    headers = (path for path in sorted(_FOLDER.iterdir()) if path.suffix in (".cuh", ".h"))
    return (_FOLDER / source).read_text(), {path.name.encode(): path.read_bytes() for path in headers}


def _log_of(program: int) -> str:
    log: str = nvrtc.getProgramLog(program)
    return log.rstrip("\0\n")
