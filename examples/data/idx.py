"""The IDX format of the MNIST files, plain or gzipped. Everything that a file states about itself is checked.

Layout (big-endian): two zero bytes, type code, number of dimensions, one uint32 per dimension, then the elements in
row-major order. Source: http://yann.lecun.com/exdb/mnist, "The IDX file format".
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distopt.errors import DataError, UsageError

if TYPE_CHECKING:
    import io

    from numpy.typing import NDArray

__all__ = ["decode", "encode", "header", "read"]

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
CODES = {np.dtype(name).newbyteorder("=").name: code for code, name in TYPES.items()}
MAX_DIMENSIONS = 32  # the limit of NumPy 1
MAX_EXPANSION = 1032  # maximum ratio of deflate (zlib technical details, "Maximum Compression Factor")
MAX_UNPACKED_BYTES = 1 << 30  # of a gzipped file, whose own size says nothing; MNIST's largest has 47 MB
CURE = "replace the file by a fresh copy"


def read(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Local. The array in an IDX file, in native byte order; gzip is recognised by content, not by name.

    Raises:
        DataError: the file is missing, unreadable, truncated, corrupt, too long, or of another format; or it is gzipped
            and would unpack to more than 1 GiB.
    """
    try:
        with Path(path).open("rb") as file:
            return decode(file, os.fstat(file.fileno()).st_size, os.fspath(path))
    except OSError as error:
        raise DataError(f"{os.fspath(path)}: {error.strerror or error}; check the path and its permissions") from error


def decode(file: io.BufferedIOBase, size_bytes: int, name: str) -> NDArray[Any]:
    """Local. As `read`, from an open file that holds `size_bytes` from its start; `name` is used in messages."""
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    limit_bytes = size_bytes * MAX_EXPANSION if packed else size_bytes
    stream = gzip.GzipFile(fileobj=file) if packed else file
    try:
        array = _parse(stream, limit_bytes, name, packed=packed)
        if stream.read(1):  # at the end of a gzip stream, this also checks the CRC
            raise DataError(f"{name}: more bytes than the {array.shape} elements that its header states; {CURE}")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{name}: the gzip stream is corrupt or truncated ({error}); {CURE}") from error
    except MemoryError as error:
        raise DataError(f"{name}: the array does not fit in memory ({error}); {CURE}") from error
    return array


def encode(array: NDArray[Any]) -> bytes:
    """Local. The content of an IDX file that holds `array`; `decode` restores it exactly.

    Raises:
        UsageError: IDX cannot hold the dtype or the shape.
    """
    big_endian = np.ascontiguousarray(array, array.dtype.newbyteorder(">"))
    return header(array) + big_endian.tobytes()


def header(array: NDArray[Any]) -> bytes:
    """Local. The bytes that precede the elements of `array` in an IDX file.

    Raises:
        UsageError: IDX cannot hold the dtype or the shape.
    """
    code = CODES.get(array.dtype.name)
    if code is None:
        raise UsageError(f"IDX cannot hold {array.dtype}; convert to one of {', '.join(CODES)}")
    if not 1 <= array.ndim <= MAX_DIMENSIONS or not all(0 < extent < 2**32 for extent in array.shape):
        raise UsageError(
            f"IDX cannot hold the shape {array.shape}; give one to {MAX_DIMENSIONS} dimensions, none empty"
        )
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)


def _parse(stream: io.BufferedIOBase, limit_bytes: int, name: str, *, packed: bool) -> NDArray[Any]:
    zero, code, ndim = struct.unpack(">HBB", _fill(np.empty(4, np.uint8), stream, name).data)
    if zero or code not in TYPES or not 1 <= ndim <= MAX_DIMENSIONS:
        raise DataError(
            f"{name}: not an IDX file: it starts with {zero:04x} {code:02x} {ndim:02x}, not with 0000, a type "
            f"code and 1 to {MAX_DIMENSIONS} dimensions; {CURE}"
        )
    shape = struct.unpack(f">{ndim}I", _fill(np.empty(4 * ndim, np.uint8), stream, name).data)
    dtype = np.dtype(TYPES[code])
    wanted_bytes = math.prod(shape) * dtype.itemsize  # Python integers: no overflow
    # Checked before anything is allocated. Empty arrays are rejected too, as their other dimensions could overflow.
    if not 0 < wanted_bytes <= limit_bytes:
        raise DataError(
            f"{name}: the header states {shape} elements of {dtype.name}, {wanted_bytes} bytes; "
            f"the file holds at most {limit_bytes}; {CURE}"
        )
    if packed and wanted_bytes > MAX_UNPACKED_BYTES:
        raise DataError(
            f"{name}: unpacks to {wanted_bytes} bytes; gzipped files are read up to {MAX_UNPACKED_BYTES} bytes; unpack "
            "it with gunzip if its contents are right"
        )
    data = _fill(np.empty(wanted_bytes, np.uint8), stream, name)
    return data.view(dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _fill(data: NDArray[np.uint8], stream: io.BufferedIOBase, name: str) -> NDArray[np.uint8]:
    got = stream.readinto(data.data)
    if got < data.size:
        raise DataError(f"{name}: truncated: {got} bytes where {data.size} must follow; {CURE}")
    return data
