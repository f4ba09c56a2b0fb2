"""The element types and reductions of the wire, shared by every communicator; csrc/base/types.h has the same."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np

ReduceOp: TypeAlias = Literal["sum", "max", "min", "mean", "product", "and", "or", "xor"]

# Codes of wire types and reductions: their places in the enumerations of csrc/base/types.h. NumPy has no bfloat16: such
# arrays are uint16 and say so with `wire=`.
DTYPES: dict[str, int] = {
    name: code
    for code, name in enumerate(
        ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8", "int16", "bool")
    )
}
OPS: dict[str, int] = {name: code for code, name in enumerate(get_args(ReduceOp))}
_FLOATS = frozenset({"float32", "float64", "float16", "bfloat16"})


def storage_of(dtype: str) -> np.dtype[Any]:
    """The dtype of arrays that store a wire type: uint16 for bfloat16, else the type itself."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


# Looked up by dtype: numpy.dtype.name is slow to compute, and every collective asks for it. A dtype of the other byte
# order is not found.
NAMES = {storage_of(name): storage_of(name).name for name in DTYPES}


def is_defined(op: str, dtype: str) -> bool:
    """Local. Whether the reduction has a meaning for that type: floats have means, the others operations on bits."""
    return dtype in _FLOATS if op == "mean" else op not in ("and", "or", "xor") or dtype not in _FLOATS
