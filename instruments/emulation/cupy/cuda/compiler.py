"""`RawModule`, its kernels, and the compiler's error. The C++ compiler compiles the sources, for the emulator."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from instruments.emulation.build import compile_kernels

from . import get_current_stream

_KNOWN = re.compile(r"--std=c\+\+17|--fmad=false|-I.*")

_ENTRY = """
extern "C" __attribute__((visibility("default"))) int entry_{i}(const emulation::Launch* launch) {{
  return emulation::enter(&{name}, *launch);
}}
"""


class CompileException(Exception):  # noqa: N818
    """As CuPy's: its text is what the compiler says."""


class RawModule:
    """Kernels that are compiled when the first one is asked for, once for all processes."""

    def __init__(self, *, code: str, options: tuple[str, ...], name_expressions: list[str]) -> None:
        self._code, self._options, self._names = code, options, name_expressions

    def get_function(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(kernel=Function(self._library[f"entry_{self._names.index(name)}"]))

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        if unknown := [option for option in self._options if not _KNOWN.fullmatch(option)]:
            raise CompileException(f"the stand-in knows no {unknown}")
        entries = (_ENTRY.format(i=i, name=name) for i, name in enumerate(self._names))
        text = "#include <emulation/entry.h>\n" + self._code + "".join(entries)
        path = Path(os.environ["CUPY_CACHE_DIR"], f"{hashlib.sha256(text.encode()).hexdigest()}.so")
        if error := compile_kernels(text, [option for option in self._options if option.startswith("-I")], path):
            raise CompileException(error)
        return ctypes.CDLL(str(path))


class _Launch(ctypes.Structure):
    """`emulation::Launch`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("stream", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("arguments", ctypes.POINTER(ctypes.c_char_p)),
        ("sizes", ctypes.POINTER(ctypes.c_size_t)),
    )


class Function:
    """A kernel. It refuses arguments whose number or sizes are wrong, where CuPy would pass rubbish."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Any) -> None:
        if not (isinstance(grid, tuple) and isinstance(block, tuple)):
            raise TypeError("grid and block are tuples")
        values = [_bytes_of(value) for value in args]
        sizes = (ctypes.c_size_t * len(values))(*map(len, values))
        dimensions = ((ctypes.c_uint * 3)(*(*given, 1, 1)[:3]) for given in (grid, block))
        stream, pointers = get_current_stream().ptr, (ctypes.c_char_p * len(values))(*values)
        code = self._entry(ctypes.byref(_Launch(*dimensions, stream, len(values), pointers, sizes)))
        if code < 0:
            what = "the number of arguments" if code == -1 else f"argument {-2 - code}"
            raise TypeError(f"{what} is wrong for the kernel: {args}")
        if code:
            raise RuntimeError(f"the kernel cannot be launched (CUDA error {code})")


def _bytes_of(value: Any) -> bytes:
    """An argument as CuPy passes it."""
    if value is None or hasattr(value, "_memory"):
        return np.int64(0 if value is None else value.data.ptr).tobytes()
    if isinstance(value, np.ndarray) and value.size != 1:
        raise TypeError("only numpy.ndarrays of size one can be passed by value")
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tobytes()
    kinds = {bool: np.bool_, int: np.int64, float: np.float64}
    return bytes(kinds[type(value)](value).tobytes())
