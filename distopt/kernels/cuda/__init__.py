"""The kernels of GPUs: the sources in this folder, compiled by NVRTC for the current GPU when they are first used.

CuPy compiles them, and keeps the machine code in `$CUPY_CACHE_DIR` or ~/.cupy/kernel_cache. It adds -ftz=true:
subnormal float32 count as zero. Names and types of arguments are read from the declarations in the sources: CuPy passes
a Python int as int64 and a float as float64, whatever the kernel takes.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import cupy
import numpy as np
from cupy.cuda.compiler import CompileException

from ...errors import MissingDependencyError, UsageError, pip_install

Array: TypeAlias = Any  # cupy.ndarray

THREADS = 256  # of a block, unless a kernel says otherwise
GRID_ROWS = 65535  # most blocks of a grid in its second dimension; kernels go round

_FOLDER = Path(__file__).parent
_TYPES = ("Half", "BFloat16")  # a kernel that is a template is compiled for both
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
    "Updates": struct.Struct("384P96Q"),
    "Headers": struct.Struct("32P"),
    "SparseLists": struct.Struct("32P32P32II0P"),
}
_KERNEL = re.compile(r"(template <[^>]*>\s+)?__global__ void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\(([^)]*)\)")


# -- launches ----------------------------------------------------------------------------------------------------------
def launch(name: str, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any) -> None:
    """Enqueue a kernel on CuPy's current stream.

    Args:
        name: with its template argument, as in "decode<Half>".
        grid: in blocks.
        block: in threads.
        arguments: of the kernel; for a pointer an array, an address, or None, and for a struct a tuple of its fields,
            where pointers are addresses.

    Raises:
        MissingDependencyError: it cannot be compiled.
        UsageError: see `check_device`.
    """
    function, converters = load(name, cupy.cuda.runtime.getDevice())
    function(grid, block, [convert(value) for convert, value in zip(converters, arguments, strict=True)])


def launch_each(name: str, count: int, *arguments: Any) -> None:
    """Launch one thread for each of `count` elements; nothing if there are none. Beyond a limit threads loop."""
    if count:
        launch(name, (min(blocks(count), 1 << 24),), (THREADS,), *arguments)


def launch_strided(name: str, items: int, *arguments: Any) -> None:
    """Launch threads that loop over `items`, as many as the device holds at a time."""
    held = cupy.cuda.Device().attributes["MultiProcessorCount"] * (2048 // THREADS)
    launch(name, (max(1, min(blocks(items), held)),), (THREADS,), *arguments)


def launch_lanes(name: str, rows: int, columns: int, *arguments: Any, most: int = THREADS) -> None:
    """Launch threads that share the columns of each row: one for a few columns, a warp, or `most` for many.

    How many they are is the kernel's last argument; see `row_of` in device.cuh.
    """
    lanes = 1 if columns <= 16 else 32 if columns <= 2048 else most
    if rows:
        launch(name, (blocks(rows * lanes),), (THREADS,), *arguments, lanes)


def launch_planes(name: str, planes: int, pixels: int, *arguments: Any) -> None:
    """Launch threads that share the pixels of each plane; nothing for an empty grid."""
    if planes and pixels:
        launch(name, (min(blocks(pixels), 1 << 24), min(planes, GRID_ROWS)), (THREADS,), *arguments)


def blocks(items: int, each: int = THREADS) -> int:
    """Number of blocks of `each` items."""
    return -(-items // each)


# -- declarations and compilation -------------------------------------------------------------------------------------
@cache
def kernels() -> dict[str, tuple[str, tuple[str, ...]]]:
    """By name of each kernel the name of its source, and the types of its parameters; "*" is a pointer."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for path in sorted(_FOLDER.glob("*.cu")):
        for template, name, parameters in _KERNEL.findall(path.read_text()):
            kinds = tuple("*" if "*" in item else item.split()[-2] for item in parameters.split(","))
            names = [f"{name}<{each}>" for each in _TYPES] if template else [name]
            found |= dict.fromkeys(names, (path.name, kinds))
    return found


def program(source: str) -> dict[str, Any]:
    """The arguments of `cupy.RawModule` for the kernels of a source: its text, the compiler's options, and the names.

    The text begins with a digest of the headers: the key of CuPy's cache is made of text, options and names.
    """
    headers = b"".join(path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in (".cuh", ".h"))
    return {
        "code": f'// {hashlib.sha256(headers).hexdigest()}\n#line 1 "{source}"\n{(_FOLDER / source).read_text()}',
        # As on the CPU no contraction into FMA: the same element-wise bits. These kernels wait for memory anyway.
        "options": ("--std=c++17", "--fmad=false", f"-I{_FOLDER}"),
        "name_expressions": [name for name, (file, _) in kernels().items() if file == source],
    }


@cache
def load(name: str, device: int) -> tuple[Any, tuple[Callable[[Any], Any], ...]]:
    """The kernel of that name on the current device, and for each of its arguments what makes CuPy's of it.

    Raises:
        MissingDependencyError: it cannot be compiled or loaded; the message has NVRTC's errors, with file and line.
    """
    source, kinds = kernels()[name]
    try:
        function = cupy.RawModule(**program(source)).get_function(name).kernel  # CuPy knows it if it has compiled it
    except (CompileException, RuntimeError) as error:
        major, minor = cupy.cuda.nvrtc.getVersion()
        raise MissingDependencyError(
            f"{source} cannot be compiled or loaded for sm_{cupy.cuda.Device(device).compute_capability} by NVRTC of "
            f"CUDA {major}.{minor} with CuPy {cupy.__version__}: {error}\nThe kernels need compute capability 8.0 or "
            f"later, and an NVRTC that knows the GPU: {pip_install(f'cuda{major}')}"
        ) from None
    return function, tuple(_converter(kind, device) for kind in kinds)


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
    """Raises a UsageError for an array on another GPU than the current one, which a new thread sets to 0."""
    if array.data.device_id != device:
        raise UsageError(
            f"an array is on GPU {array.data.device_id}, but this thread computes on GPU {device}; call "
            f"cupy.cuda.Device({array.data.device_id}).use() in this thread"
        )
