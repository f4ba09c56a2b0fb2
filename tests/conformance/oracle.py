"""The reference for every communicator, in plain NumPy: one loop over the ranks, in rank order."""

from collections.abc import Sequence

import numpy as np

from distopt.comm.base import DTYPES, Array, ReduceOp

STORAGE = {name: "uint16" if name == "bfloat16" else name for name in DTYPES}
# Of booleans, NumPy's sum is "or" and its product "and".
_SIMPLE = {"product": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def bfloat16_from(values: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even, as uint16."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def bfloat16_to(stored: Array) -> Array:
    return (stored.astype(np.uint32) << 16).view(np.float32)


def _float16(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _float32(values: Array) -> Array:
    return values.astype(np.float32)


def reduce_in_rank_order(arrays: Sequence[Array], dtype: str, op: ReduceOp) -> Array:
    """The reduction of the arrays of all ranks; max and min take the first NaN, and the first of equal values."""
    wide = {"float16": lambda a: a.astype(np.float32), "bfloat16": bfloat16_to}.get(dtype, lambda a: a)
    with np.errstate(all="ignore"):
        total = wide(arrays[0]).copy()
        for array in arrays[1:]:
            value = wide(array)
            if op == "max":
                total = np.where((total >= value) | (total != total), total, value)  # noqa: PLR0124 - NaN
            elif op == "min":
                total = np.where((total <= value) | (total != total), total, value)  # noqa: PLR0124 - NaN
            else:
                total = _SIMPLE.get(op, np.add)(total, value)
        if op == "mean":
            total = total / total.dtype.type(len(arrays))
        if dtype == "bfloat16":
            return bfloat16_from(total)
        return total.astype(dtype)


def reduce_by_host(arrays: Sequence[Array], hosts: Sequence[str], dtype: str, op: ReduceOp) -> Array:
    """The reduction of what the reductions of each host give; 16-bit floats are rounded, and divided, in both.

    The mean over hosts with different numbers of ranks is the sum in float32, divided once.
    """
    groups: dict[str, list[Array]] = {}
    for host, array in zip(hosts, arrays, strict=True):
        groups.setdefault(host, []).append(array)
    uneven = len({len(group) for group in groups.values()}) > 1
    if uneven and op == "mean" and dtype in ("float16", "bfloat16"):
        narrow, wide = (bfloat16_from, bfloat16_to) if dtype == "bfloat16" else (_float16, _float32)
        return narrow(reduce_by_host([wide(array) for array in arrays], hosts, "float32", op))
    divides = op == "mean" and dtype in ("float32", "float64")
    stage: ReduceOp = "sum" if divides else op
    total = reduce_in_rank_order([reduce_in_rank_order(group, dtype, stage) for group in groups.values()], dtype, stage)
    return total / total.dtype.type(len(arrays)) if divides else total
