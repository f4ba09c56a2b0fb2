"""Python data as bytes and back, without pickle: reading never executes code, from any source.

The bytes are the length of a JSON text, that text, and the contents of arrays in NumPy's format (`.npy`) and of bytes.
In the text, None, booleans, numbers and strings are themselves; all else is a list of its type's name and its parts.
"""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from ..errors import UsageError
from ..kernels import check_unmasked

_CARRIED = "None, bool, int, float, str, bytes, list, tuple, dict and NumPy arrays and scalars"
_LENGTH_BYTES = 8
_MAX_INT_BITS = 12_000  # Python refuses to read longer ones in decimal


def packed(value: Any) -> bytes:
    """Local. The bytes of `value`.

    Raises:
        UsageError: it has a part of another type, which the message names, or contains itself.
    """
    contents: list[bytes] = []
    try:
        # As it is: in escapes, two surrogates would become one character.
        text = json.dumps(_noted(value, "obj", contents), ensure_ascii=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise UsageError("obj is nested too deeply, or contains itself; send its parts one by one") from None
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *contents])


def unpacked(data: bytes) -> Any:
    """Local. The inverse of `packed`."""
    stream = io.BytesIO(data)
    text = stream.read(int.from_bytes(stream.read(_LENGTH_BYTES), "little"))
    return _read(json.loads(text.decode("utf-8", "surrogatepass")), stream)


def _noted(value: Any, path: str, contents: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() <= _MAX_INT_BITS):
        return value
    if kind in (list, tuple):
        return [kind.__name__, *(_noted(part, f"{path}[{i}]", contents) for i, part in enumerate(value))]
    if kind is dict:
        # As pairs, because keys in JSON are strings. A key is first found to be one that messages can show.
        keys = [_noted(key, f"a key of {path}", contents) for key in value]
        parts = [_noted(part, f"{path}[{key!r}]", contents) for key, part in value.items()]
        return ["dict", keys, parts]
    if kind is bytes:
        contents.append(value)
        return ["bytes", len(value)]
    if (kind is np.ndarray or isinstance(value, np.generic)) and _is_in_npy(value.dtype):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.asanyarray(value), allow_pickle=False)
        contents.append(stream.getvalue())
        return ["array" if kind is np.ndarray else "scalar", len(contents[-1])]
    check_unmasked(value)
    of_type = f" of {value.dtype}" if kind is np.ndarray else ""
    raise UsageError(f"{path} is a {kind.__name__}{of_type}, which is not sent; convert it to {_CARRIED}")


def _is_in_npy(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy's format has this type; of others, such as bfloat16 of ml_dtypes, it keeps the size only."""
    if dtype.hasobject:
        return False
    try:
        described = np.lib.format.dtype_to_descr(dtype)
    except ValueError:  # fields that overlap
        return False
    return np.lib.format.descr_to_dtype(described) == dtype


def _read(note: Any, stream: io.BytesIO) -> Any:
    if not isinstance(note, list):
        return note
    kind, *parts = note
    if kind == "list":
        return [_read(part, stream) for part in parts]
    if kind == "tuple":
        return tuple([_read(part, stream) for part in parts])
    if kind == "dict":
        keys, values = ([_read(part, stream) for part in group] for group in parts)
        return dict(zip(keys, values, strict=True))
    content = stream.read(parts[0])
    if kind == "bytes":
        return content
    array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return array if kind == "array" else array[()]
