"""The kernels on CuPy arrays, on the current stream of the current device; see `base.Kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from .. import _cuda
from .base import FINDINGS, Accumulation, Array, Lists

_SMALLEST = 2.0**-149  # of the float32 above zero


class _DeviceLists(Lists):
    def __init__(self, capacity: int) -> None:
        super().__init__(cupy, capacity)
        self._workspace: Array = cupy.empty(0, np.uint8)

    def workspace(self, n: int, candidates: int) -> int:
        """Address of the workspace of a selection from `n` elements."""
        n_bytes = _cuda.select_workspace(n, candidates)
        if self._workspace.size < n_bytes:
            self._workspace = cupy.empty(n_bytes, np.uint8)
        return _at(self._workspace)


empty = cupy.empty
new_lists = _DeviceLists


def to_host(array: Array) -> Array:
    """See `Kernels.to_host`; waits for the stream."""
    return array.get()


def copy_into(target: Array, source: Array) -> None:
    """See `Kernels.copy_into`."""
    if isinstance(source, np.ndarray):
        target.set(source)
    else:
        target[...] = source


def encode16(
    x: Array, residuals: tuple[Array, Array], wire: Array, dtype: str, scale: float, limit: float, findings: Array
) -> None:
    """See `Kernels.encode16`."""
    old, new = map(_at, residuals)
    _cuda.encode16(_at(x), old, new, _at(wire), x.size, scale, limit, dtype, _at(findings), _stream())


def decode16(wire: Array, x: Array, dtype: str, scale: float) -> None:
    """See `Kernels.decode16`."""
    _cuda.decode16(_at(wire), _at(x), x.size, scale, dtype, _stream())


def squared_norm(x: Array) -> Any:
    """See `Kernels.squared_norm`; the result is an array on the device."""
    return _norm_and_scale(x, 1.0)[0].reshape(()) if x.dtype == np.float32 else (x * x).sum()


def clip_scale(x: Array, limit: float) -> Any:
    """See `Kernels.clip_scale`; the factor is an array of one float32 on the device."""
    return _norm_and_scale(x, limit)[1]


def _norm_and_scale(x: Array, limit: float) -> tuple[Array, Array]:
    parts, norm, scale = (
        cupy.empty(count, dtype)
        for count, dtype in ((_cuda.squared_norm_parts, np.float64), (1, np.float64), (1, np.float32))
    )
    _cuda.squared_norm(_at(x), x.size, _at(parts), _at(norm), _at(scale), limit, _stream())
    return norm, scale


def _find_nonfinite(x: Array, from_bad: Array) -> None:
    _cuda.find_nonfinite(_code_of(x), _at(x), x.size, _at(from_bad), _stream())


def mark_beyond(x: Array, limit: float, from_bad: Array) -> None:
    """See `Kernels.mark_beyond`."""
    _cuda.mark_beyond(_code_of(x), _at(x), x.size, limit, _at(from_bad), _stream())


def first_nonfinite(x: Array) -> int | None:
    """See `Kernels.first_nonfinite`."""
    found = cupy.empty(1, np.int64)
    _find_nonfinite(x, found)
    from_bad = int(found.item())
    return x.size - from_bad if from_bad else None


def accumulate(x: Array, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
    """See `Kernels.accumulate`."""
    if accumulation.residual is not None and x.size:  # the address of an empty array is 0
        _cuda.accumulate(_source(x, accumulation), x.size, _at(findings), _stream())
    else:
        findings.fill(0)
        _find_nonfinite(x, findings[2:])


def top_k(x: Array, k: int, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
    """See `Kernels.top_k`; `lists` must come from `new_lists`."""
    assert isinstance(lists, _DeviceLists)
    lists.reserve(k)
    workspace = lists.workspace(x.size, _cuda.candidate_capacity(x.size, k))
    outputs = _at(lists.indices), _at(lists.values), workspace
    _cuda.top_k(_source(x, accumulation), x.size, k, *outputs, _at(findings), _stream())


def threshold(x: Array, bound: float, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
    """See `Kernels.threshold`; `lists` must come from `new_lists`, and do not grow."""
    assert isinstance(lists, _DeviceLists)
    capacity = lists.values.size
    outputs = _at(lists.indices), _at(lists.values), capacity, lists.workspace(x.size, capacity)
    _cuda.threshold(_source(x, accumulation), x.size, bound, *outputs, _at(findings), _stream())


def nonzero(x: Array) -> tuple[Array, Array]:
    """See `Kernels.nonzero`; a selection with the smallest float32 above zero as threshold."""
    lists, findings = _DeviceLists(x.size), cupy.empty(FINDINGS, np.int64)
    threshold(x, _SMALLEST, Accumulation(), lists, findings)
    count = int(findings[0].item())
    return lists.indices[:count], lists.values[:count]


def clear_at(dense: Array, indices: Array) -> None:
    """See `Kernels.clear_at`."""
    _cuda.clear_at(_at(dense), _at(indices), indices.size, _stream())


def scatter_sum(
    dense: Array, indices: Sequence[Array], values: Sequence[Array], lo: int, hi: int, scale: float = 1.0
) -> None:
    """See `Kernels.scatter_sum`."""
    counts = [array.size for array in values]
    where = [_at(array) for array in indices], [_at(array) for array in values], counts
    _cuda.scatter_sum(_at(dense), dense.size, *where, lo, hi, scale, _stream())


def cuts(indices: Array, bounds: Sequence[int]) -> list[int]:
    """See `Kernels.cuts`."""
    found: list[int] = cupy.searchsorted(indices, cupy.asarray(bounds, dtype=indices.dtype)).tolist()
    return found


def _stream() -> int:
    return int(cupy.cuda.get_current_stream().ptr)


def _at(array: Array | None) -> int:
    return 0 if array is None else int(array.data.ptr)


def _code_of(x: Array) -> int:
    return int(x.dtype == np.float64)  # of csrc/base/types.h


def _source(x: Array, accumulation: Accumulation) -> tuple[int, int, int, float, int, float, int, int]:
    residual, momentum, scale, decay, new_residual, new_momentum = accumulation
    factor = (1.0, _at(scale)) if isinstance(scale, cupy.ndarray) else (scale, 0)
    new = (
        _at(residual if new_residual is None else new_residual),
        _at(momentum if new_momentum is None else new_momentum),
    )
    return _at(x), _at(residual), _at(momentum), *factor, decay, *new
