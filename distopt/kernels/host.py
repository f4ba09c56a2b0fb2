"""The kernels on NumPy arrays. `base.Kernels` documents them; differences are noted here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _core
from .base import FROM_BAD, Accumulation, Array, Lists

_LARGEST = {np.dtype(name): float(np.finfo(name).max) for name in ("float32", "float64")}


empty, copy_into = np.empty, np.copyto
decode16, clear_at = _core.decode16, _core.clear_at
decode_blocks, decode_chunks = _core.decode_blocks, _core.decode_chunks


def to_host(array: Array) -> Array:
    return array.copy()


def copy_where(flag: Array, source: Array, target: Array) -> None:
    np.copyto(target, source, where=flag)


def fetch(array: Array) -> Callable[[], Array]:
    return lambda: array


def new_lists(capacity: int) -> Lists:
    """As `Kernels.new_lists`; the native kernels write up to `_core.list_slack` entries beyond the selection."""
    return Lists(np, capacity + _core.list_slack)


def encode16(
    x: Array, residuals: tuple[Array, Array], wire: Array, dtype: str, scale: float, limit: float, findings: Array
) -> None:
    overflowed, underflowed, nan = _core.encode16(x, wire, dtype, scale, limit, *residuals)
    from_bad = 0
    if residuals[1] is None and nan:
        from_bad = _from_first(np.isnan(x))
    elif nan or (overflowed and residuals[1] is not None):
        from_bad = _from_bad(residuals[1])
    findings[:] = 0, overflowed, from_bad, underflowed


def encode_blocks(
    x: Array, residuals: tuple[Array, Array], wire: Array, bits: int, seed: int | None, findings: Array
) -> None:
    first_bad = _core.encode_blocks(x, wire, bits, *residuals, seed)
    findings[:] = 0, 0, x.size - first_bad, 0


def encode_chunks(x: Array, residuals: tuple[Array, Array], wire: Array, k: int, bits: int, findings: Array) -> None:
    first_bad = _core.encode_chunks(x, wire, k, bits, *residuals)
    findings[:] = 0, 0, x.size - first_bad, 0


def squared_norm(x: Array) -> Any:
    """As `Kernels.squared_norm`; the result is a number."""
    return _core.squared_norm(x) if x.dtype == np.float32 else np.dot(x, x)


def clip_scale(x: Array, limit: float) -> Any:
    """As `Kernels.clip_scale`; the factor is a number."""
    norm = math.sqrt(_core.squared_norm(x))
    # A norm that is NaN or infinite must not scale the element away that an error is about to name.
    return limit / norm if limit < norm < math.inf else 1.0


def first_nonfinite(x: Array) -> int | None:
    return _core.first_beyond(x, _LARGEST[x.dtype])


def find_beyond(x: Array, limit: float, from_bad: Array) -> None:
    index = _core.first_beyond(x, limit)
    from_bad[0] = 0 if index is None else x.size - index


def any_bad(headers: Sequence[Array]) -> Array:
    return np.array(any(each[FROM_BAD :: FROM_BAD + 1].any() for each in headers))


def accumulate(x: Array, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
    lists.reserve(_core.top_k_capacity(x.size, 0))
    if accumulation.residual is not None:
        _core.top_k(x, 0, lists.indices, lists.values, *accumulation)
    source = accumulation.source(x)
    finite = math.isfinite(_core.squared_norm(source))
    findings[:] = 0, 0, 0 if finite else _from_bad(source), 0


def top_k(x: Array, k: int, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
    lists.reserve(_core.top_k_capacity(x.size, k))
    count, unusable = _core.top_k(x, k, lists.indices, lists.values, *accumulation)
    findings[:] = count, 0, _from_bad(accumulation.source(x)) if unusable else 0, 0


def threshold(x: Array, bound: float, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
    """As `Kernels.threshold`; the lists grow if they have too little room."""
    count, unusable = _core.threshold(x, bound, lists.indices, lists.values, *accumulation)
    source = accumulation.source(x)
    if count + _core.list_slack > lists.values.size:
        # Once more with more room; the accumulated values are in the source by now.
        lists.reserve(count + count // 4 + _core.list_slack)
        count, unusable = _core.threshold(source, bound, lists.indices, lists.values)
    findings[:] = count, 0, _from_bad(source) if unusable else 0, 0


def nonzero(x: Array) -> tuple[Array, Array]:
    indices = np.flatnonzero(x).astype(np.int32)
    return indices, x[indices]


def scatter_sum(
    dense: Array, indices: Sequence[Array], values: Sequence[Array], lo: int, hi: int, scale: float = 1.0
) -> None:
    dense[lo:hi].fill(0)
    _core.scatter_add(dense, indices, values, lo, hi, scale)


def cuts(indices: Array, bounds: Sequence[int]) -> list[int]:
    found: list[int] = np.searchsorted(indices, bounds).tolist()
    return found


def _from_bad(x: Array) -> int:
    return _from_first(~np.isfinite(x))


def _from_first(mask: Array) -> int:
    """Elements from the first true one to the end, or 0."""
    hits = np.flatnonzero(mask)
    return int(mask.size - hits[0]) if hits.size else 0
