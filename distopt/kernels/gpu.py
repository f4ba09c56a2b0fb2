"""The kernels on CuPy arrays, on the current stream of the current device.

`base.Kernels` documents them; differences are noted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate as running_sums
from itertools import chain
from typing import Any

import cupy
import numpy as np

from .. import _core
from .base import FINDINGS, FROM_BAD, Accumulation, Array, Lists
from .cuda import THREADS, blocks, launch, launch_each, launch_strided

_SMALLEST = 2.0**-149  # of the float32 above zero
_NORM_PARTS = 1024
_TILE = 4096  # elements of a block that selects, in select.cu, or sums lists, in sparse.cu
_SELECT_STATE_BYTES = 16384  # room for SelectState in select.cu, at least
_SELECT_THREADS = 1024  # of a kernel of one block in select.cu
_DIGITS = (31, 20), (20, 10), (10, 0)  # the bits of a key where the digits of its boundary end and begin
_WARPS = THREADS // 32
_MOST_LISTS = 32  # in SparseLists of sparse.cu, and in Headers of codec.cu
_TYPES = {"float16": "Half", "bfloat16": "BFloat16"}
_NO_KEY = 0x7FFFFFFF  # top_key of shared.h


_copying: dict[Any, Any] = {}  # pinned memory by the event behind its copy

empty = cupy.empty
new_lists = partial(Lists, cupy)


def to_host(array: Array) -> Array:
    """As `Kernels.to_host`; waits for the stream."""
    return array.get()


def copy_into(target: Array, source: Array) -> None:
    if isinstance(source, np.ndarray):
        target.set(source)
    else:
        target[...] = source


def copy_where(flag: Array, source: Array, target: Array) -> None:
    cupy.copyto(target, source, where=flag)


def pinned_like(array: Array) -> Array:
    """A flat array of NumPy, of the type and the size of `array`, in pinned memory."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(array.nbytes, 1)), array.dtype, array.size)


def keep_until(copied: Any, memory: Any) -> None:
    """Keep pinned memory until an event behind its copy: CuPy gives what is let go to others at once."""
    for event in [event for event in list(_copying) if event.done]:
        _copying.pop(event, None)
    _copying[copied] = memory


def fetch(array: Array) -> Callable[[], Array]:
    """As `Kernels.fetch`; waits for the copy alone, not for what the stream holds behind it."""
    out = pinned_like(array)
    array.get(out=out, blocking=False)
    event = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))
    keep_until(event, out)

    def arrived() -> Array:
        if not event.done:
            event.synchronize()
        return out

    return arrived


def encode16(
    x: Array, residuals: tuple[Array, Array], wire: Array, dtype: str, scale: float, limit: float, findings: Array
) -> None:
    findings.fill(0)
    given = x, *residuals, wire, x.size, scale, limit, findings
    launch_strided(f"encode<{_type_16(dtype)}>", blocks(x.size, 4), *given)


def decode16(wire: Array, x: Array, dtype: str, scale: float) -> None:
    launch_each(f"decode<{_type_16(dtype)}>", blocks(x.size, 4), wire, x, x.size, scale)


def encode_blocks(
    x: Array, residuals: tuple[Array, Array], wire: Array, bits: int, seed: int | None, findings: Array
) -> None:
    findings.fill(0)
    items = blocks(x.size, _core.quantized_block) * THREADS
    launch_strided("encode_blocks", items, x, *residuals, wire, x.size, bits, seed is not None, seed or 0, findings)


def decode_blocks(wire: Array, x: Array, bits: int, factor: float, adds: bool) -> None:
    launch_each("decode_blocks", x.size, wire, x, x.size, bits, factor, adds)


def encode_chunks(x: Array, residuals: tuple[Array, Array], wire: Array, k: int, bits: int, findings: Array) -> None:
    findings.fill(0)
    if chunks := blocks(x.size, _core.top_chunk):
        launch("encode_chunks", (chunks,), (THREADS,), x, *residuals, wire, x.size, k, bits, findings)


def decode_chunks(wires: Array, x: Array, k: int, bits: int, factor: float) -> None:
    if chunks := blocks(x.size, _core.top_chunk):
        launch("decode_chunks", (chunks,), (THREADS,), wires, *wires.shape, x, x.size, k, bits, factor)


def squared_norm(x: Array) -> Any:
    """As `Kernels.squared_norm`; the result is an array on the device."""
    return _norm_and_scale(x, 1.0)[0].reshape(()) if x.dtype == np.float32 else (x * x).sum()


def clip_scale(x: Array, limit: float) -> Any:
    """As `Kernels.clip_scale`; the factor is an array of one float32 on the device."""
    return _norm_and_scale(x, limit)[1]


def _norm_and_scale(x: Array, limit: float) -> tuple[Array, Array]:
    parts, norm, scale = cupy.empty(_NORM_PARTS, np.float64), cupy.empty(1, np.float64), cupy.empty(1, np.float32)
    count = min(max(blocks(x.size, 4 * THREADS), 1), _NORM_PARTS)
    launch("norm_parts", (count,), (THREADS,), x, x.size, parts)
    launch("norm_and_scale", (1,), (THREADS,), parts, count, norm, scale, limit)
    return norm, scale


def find_beyond(x: Array, limit: float, from_bad: Array) -> None:
    from_bad.fill(0)
    if x.dtype == np.float32:
        launch_strided("find_beyond", blocks(x.size, 4), x, x.size, limit, from_bad)
    elif x.size:  # float64, of some models in PyTorch
        beyond = ~(abs(x) <= limit)  # NaN, too
        from_bad[...] = (x.size - beyond.argmax()) * beyond.any()


def any_bad(headers: Sequence[Array]) -> Array:
    flag, ranks = cupy.empty((), np.bool_), headers[0].size // (FROM_BAD + 1)
    for first in range(0, len(headers), _MOST_LISTS):
        some = [_at(each) for each in headers[first : first + _MOST_LISTS]]
        fields = *some, *[0] * (_MOST_LISTS - len(some))
        launch("any_bad", (1,), (THREADS,), fields, len(some), ranks, first > 0, flag)
    return flag


def first_nonfinite(x: Array) -> int | None:
    found = cupy.empty(1, np.int64)
    find_beyond(x, float(np.finfo(x.dtype).max), found)
    from_bad = int(found.item())
    return x.size - from_bad if from_bad else None


def accumulate(x: Array, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
    """As `Kernels.accumulate`; a selection above a bound that no element reaches."""
    _select(x, 0, (0, 0, _NO_KEY), 0, accumulation, lists, findings)


def top_k(x: Array, k: int, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
    """As `Kernels.top_k`.

    Reads (and accumulates) every element once and the few candidates several times; where the estimate fails every
    element up to six times.
    """
    if not 1 <= k <= x.size:
        raise ValueError(f"k is {k}, outside of 1 ... {x.size}")
    lists.reserve(k)
    strata, rank, capacity = _core.selection_estimate(x.size, k)
    _select(x, k, (strata, rank, _NO_KEY), capacity, accumulation, lists, findings)


def threshold(x: Array, bound: float, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
    """As `Kernels.threshold`; the lists do not grow.

    Reads (and accumulates) every element once. If there are more entries than room, repeat it without the accumulation.
    """
    if not bound >= 0:
        raise ValueError(f"the bound is {bound}, not a number from 0 up")
    floor = (int(np.float32(bound).view(np.int32)) & _NO_KEY) - 1
    _select(x, 0, (0, 0, floor), min(lists.values.size, x.size), accumulation, lists, findings)


def _select(
    x: Array,
    k: int,
    sample: tuple[int, int, int],
    capacity: int,
    accumulation: Accumulation,
    lists: Lists,
    findings: Array,
) -> None:
    """The k largest; with a k of 0 all above the floor. `sample` has strata and rank, and the floor for no strata."""
    if x.size > np.iinfo(np.int32).max:
        raise ValueError(f"int32 indices reach 2^31 - 1 elements, not {x.size}")
    source, tiles = _source(x, accumulation), blocks(x.size, _TILE)
    # The fields of Workspace in select.cu. CuPy gives this memory out again in the order of the stream.
    sizes = _SELECT_STATE_BYTES, 8 * tiles, 8 * tiles, 4 * capacity, 4 * capacity
    room = cupy.empty(sum(sizes), np.uint8)
    workspace = *running_sums(sizes[:-1], initial=_at(room)), capacity
    launch("prepare", (1,), (_SELECT_THREADS,), source, x.size, k, *sample, room, findings)
    if not x.size:
        return
    launch("collect_candidates", (tiles,), (THREADS,), source, x.size, workspace, findings)
    searched = workspace, accumulation.source(x), x.size, k
    # Few blocks, for the candidates: each adds its counts to those of all, which soon takes longer than the search.
    items = blocks(capacity if sample[0] else x.size, 32)
    if k:  # otherwise all candidates are kept
        for known, shift in _DIGITS:
            launch_strided("digit", items, *searched, known, shift)
        launch("count_kept", (blocks(tiles, _WARPS),), (THREADS,), *searched, tiles)
    launch("scan", (1,), (_SELECT_THREADS,), workspace, tiles, findings)
    launch("write_kept", (blocks(tiles, _WARPS),), (THREADS,), *searched, tiles, lists.indices, lists.values)


def nonzero(x: Array) -> tuple[Array, Array]:
    """As `Kernels.nonzero`; a selection with the smallest float32 above zero as threshold."""
    lists, findings = new_lists(x.size), cupy.empty(FINDINGS, np.int64)
    threshold(x, _SMALLEST, Accumulation(), lists, findings)
    count = int(findings[0].item())
    return lists.indices[:count], lists.values[:count]


def clear_at(dense: Array, indices: Array) -> None:
    dense[indices] = 0


def scatter_sum(
    dense: Array, indices: Sequence[Array], values: Sequence[Array], lo: int, hi: int, scale: float = 1.0
) -> None:
    if not 0 <= lo <= hi <= dense.size:
        raise ValueError(f"the range {lo} ... {hi} leaves the dense array of {dense.size} elements")
    if lo == hi:
        return
    lists = [(_at(index), _at(value), value.size) for index, value in zip(indices, values, strict=True)]
    for first in range(0, max(len(lists), 1), _MOST_LISTS):  # once without lists too: the sum of nothing is zero
        some = lists[first : first + _MOST_LISTS]
        fields = chain(*zip(*some, *[(0, 0, 0)] * (_MOST_LISTS - len(some)), strict=True))
        given = dense, (*fields, len(some)), lo, hi, scale, first > 0
        launch("scatter", (blocks(hi - lo, _TILE),), (THREADS,), *given)


def cuts(indices: Array, bounds: Sequence[int]) -> list[int]:
    found: list[int] = cupy.searchsorted(indices, cupy.asarray(bounds, dtype=indices.dtype)).tolist()
    return found


def _at(array: Array | None) -> int:
    return 0 if array is None else int(array.data.ptr)


def _type_16(dtype: str) -> str:
    if dtype not in _TYPES:
        raise ValueError(f"the 16-bit types are float16 and bfloat16, not {dtype}")
    return _TYPES[dtype]


def _source(x: Array, accumulation: Accumulation) -> tuple[Any, ...]:
    """The fields of Source in select.cu."""
    residual, momentum, scale, decay, new_residual, new_momentum = accumulation
    if momentum is not None and residual is None:
        raise ValueError("momentum needs a residual")
    factor = (1.0, _at(scale)) if isinstance(scale, cupy.ndarray) else (scale, 0)
    new = residual if new_residual is None else new_residual, momentum if new_momentum is None else new_momentum
    return _at(x), _at(residual), _at(momentum), *factor, decay, *map(_at, new)
