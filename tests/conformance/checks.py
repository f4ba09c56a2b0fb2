"""Checks of every communicator. Each is collective, and is called by every `rank` of `n`; see `run.run_checks`."""

import functools
import itertools
import sys
import time
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest

from distopt.comm.base import DTYPES, OPS, Array, Communicator, RaggedWork, ReduceOp, Work
from distopt.comm.sparse import sparse_all_reduce
from distopt.errors import UsageError

from . import nonfinite
from .oracle import STORAGE, bfloat16_from, bfloat16_to, reduce_by_host, reduce_in_rank_order

# Elements: nothing, one, odd, around a cache line per rank, around what fits in a descriptor (4,096 bytes), around
# chunks of shared memory (8,192 bytes in the runs with small chunks) for any item size, and many chunks with a rest.
SIZES = (0, 1, 7, 15, 16, 17, 63, 65, 511, 512, 513, 1023, 1024, 1025, 2047, 2049, 4097, 16384, 32769, 200_003)
_LONGEST = 202_000
FEW_SIZES = (0, 1, 513, 1025, 40_001)
FLOATS = ("float32", "float64", "float16", "bfloat16")
BITS = ("and", "or", "xor")
COMBINATIONS = [(d, o) for d in DTYPES for o in OPS if not (o in BITS if d in FLOATS else o == "mean")]


@functools.lru_cache(maxsize=64)
def _long_values(rank: int, dtype: str) -> Array:
    rng = np.random.default_rng([rank, DTYPES[dtype]])
    if dtype == "bool":
        return rng.integers(0, 2, _LONGEST).astype(dtype)
    if dtype not in FLOATS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, _LONGEST, dtype, endpoint=True)  # sums wrap around
    numbers = rng.standard_normal(_LONGEST) * 10.0 ** rng.integers(-3, 4, _LONGEST)
    return bfloat16_from(numbers.astype(np.float32)) if dtype == "bfloat16" else numbers.astype(dtype)


@functools.lru_cache(maxsize=8)
def _long_results(hosts: tuple[str, ...], dtype: str, op: ReduceOp) -> tuple[Array, Array]:
    arrays = [_long_values(q, dtype) for q in range(len(hosts))]
    return reduce_in_rank_order(arrays, dtype, op), reduce_by_host(arrays, hosts, dtype, op)


def finish(steps: Generator[Work, None, int], timeout: float | None = None) -> int:
    """Drive `steps` to its end, waiting at most `timeout` seconds for each work; what it returns."""
    while True:
        try:
            work = next(steps)
        except StopIteration as end:
            return int(end.value)
        work.wait(timeout)


def _window(count: int, salt: int) -> slice:
    first = (7 * count + 13 * salt) % 1000
    return slice(first, first + count)


def values(rank: int, count: int, dtype: str, salt: int = 0) -> Array:
    """Data that depend on rank and index, with signs, many magnitudes and, in 16 bits, sums that must round."""
    return _long_values(rank, dtype)[_window(count, salt)].copy()


def all_values(comm: Communicator, count: int, dtype: str, salt: int = 0) -> list[Array]:
    return [values(q, count, dtype, salt) for q in range(comm.topology.world_size)]


def result(comm: Communicator, count: int, dtype: str, op: ReduceOp = "sum", salt: int = 0) -> Array:
    """The expected reduction of all ranks' `values`. Computed once for all counts: the oracle is slow."""
    results = _long_results(comm.topology.hosts, dtype, op)
    return documented(comm, *(whole[_window(count, salt)] for whole in results))


def scattered(comm: Communicator, count: int, dtype: str, op: ReduceOp = "sum", salt: int = 0) -> Array:
    """The same for `comm.reduce_scatter`, all parts."""
    flat, by_host = _long_results(comm.topology.hosts, dtype, op)
    return (by_host if comm.by_host_above_bytes == 0 else flat)[_window(count, salt)]


def documented(comm: Communicator, flat: Array, by_host: Array) -> Array:
    """Combine both results as `comm.all_reduce` must: it may reduce large arrays host by host, except a remainder."""
    if comm.by_host_above_bytes is None or flat.nbytes <= comm.by_host_above_bytes:
        return flat
    slices = comm.topology.local_size if comm.by_host_above_bytes else 1
    even = flat.size // slices * slices
    return np.concatenate([by_host[:even], flat[even:]])


def host(array: Array) -> Array:
    """As a NumPy array."""
    return array if isinstance(array, np.ndarray) else array.get()


def assert_reduced(
    comm: Communicator, dtype: str, actual: Array, expected: Array, inputs: Sequence[Array], what: object
) -> None:
    """The same bits, or what is left to a transport that adds in an order of its own: a rounding at each step."""
    same_bits = host(actual).tobytes() == expected.tobytes()
    if same_bits or comm.ordered_sums or dtype not in FLOATS:
        assert_same_bits(actual, expected, what)
        return
    bfloat = dtype == "bfloat16"
    wide = [(bfloat16_to(a) if bfloat else a).astype(np.float64) for a in (host(actual), expected, *inputs)]
    eps = 2.0**-8 if bfloat else float(np.finfo(expected.dtype).eps)
    tiny = 2.0**-130 if bfloat else float(np.finfo(expected.dtype).smallest_subnormal)
    bound = (eps * np.sum(np.abs(wide[2:]), axis=0) + tiny) * len(inputs)
    assert actual.dtype == expected.dtype, what
    wrong = np.flatnonzero(~(np.abs(wide[0] - wide[1]) <= bound))
    assert wrong.size == 0, f"{what}: {wrong.size} of {expected.size} wrong, first at {wrong[0]}"


def assert_same_bits(actual: Array, expected: Array, what: object) -> None:
    actual = host(actual)
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    wrong = np.flatnonzero(actual.view(f"u{actual.itemsize}") != expected.view(f"u{expected.itemsize}"))
    assert wrong.size == 0, (
        f"{what}: {wrong.size} of {actual.size} wrong, first at {wrong[0]}: "
        f"{actual[wrong[0]]!r} instead of {expected[wrong[0]]!r}"
    )


class Places:
    """Arrays to communicate: ordinary ones, wire memory, parts of it at odd offsets; on a GPU also the host's."""

    def __init__(self, comm: Communicator, dtype: str, capacity: int) -> None:
        self.names = ("ordinary", "wire", "wire offset", *(["host"] if comm.xp is not np else []))
        self._xp = comm.xp
        self._wire = comm.empty(capacity + 3, dtype)
        assert self._wire.size == capacity + 3
        assert self._wire.dtype == STORAGE[dtype]

    def array(self, place: str, contents: Array) -> Array:
        if place == "host":
            return contents.copy()
        if place == "ordinary":
            return self._xp.array(contents)
        first = 3 if place == "wire offset" else 0
        view = self._wire[first : first + contents.size]
        view[...] = self._xp.asarray(contents)
        return view

    def empty(self, place: str, count: int) -> Array:
        return (np if place == "host" else self._xp).empty(count, self._wire.dtype)


def only_read(array: Array) -> Array:
    """What a collective only reads may be read-only."""
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    return array


def refused(comm: Communicator, dtype: str, op: Any = None) -> bool:
    """Whether the transport refuses the type or the operation, in words; all ranks alike."""
    if dtype in comm.dtypes and (op is None or comm.can_reduce(op, dtype)):
        return False
    with pytest.raises(UsageError, match=r"cannot be sent|unknown reduction|has no .* of"):
        comm.all_reduce(comm.xp.zeros(3, STORAGE[dtype]), op or "sum", wire=dtype)
    return True


def check_all_reduce(comm: Communicator, n: int, rank: int, dtype: str, op: Any) -> None:
    places = Places(comm, dtype, max(SIZES))
    for count, place in itertools.product(SIZES, places.names):
        array = places.array(place, values(rank, count, dtype))
        assert comm.all_reduce(array, op, wire=dtype).wait() is None
        inputs = all_values(comm, count, dtype)
        assert_reduced(comm, dtype, array, result(comm, count, dtype, op), inputs, (count, place))


def check_reduce_scatter(comm: Communicator, n: int, rank: int, dtype: str, op: Any) -> None:
    places = Places(comm, dtype, n * max(FEW_SIZES))
    for count, place, in_place in itertools.product(FEW_SIZES, places.names, (False, True)):
        array = places.array(place, values(rank, n * count, dtype))
        mine = slice(rank * count, (rank + 1) * count)
        out = array[mine] if in_place else places.empty(place, count)
        comm.reduce_scatter(array if in_place else only_read(array), out, op, wire=dtype).wait()
        expected = scattered(comm, n * count, dtype, op)[mine]
        inputs = [whole[mine] for whole in all_values(comm, n * count, dtype)]
        assert_reduced(comm, dtype, out, expected, inputs, (count, place, in_place))


def check_all_gather(comm: Communicator, n: int, rank: int, dtype: str) -> None:
    places = Places(comm, dtype, n * max(FEW_SIZES))
    for count, place, in_place in itertools.product(FEW_SIZES, places.names, (False, True)):
        inputs = all_values(comm, count, dtype)
        if in_place:
            out = places.array(place, np.zeros(n * count, STORAGE[dtype]))
            array = out[rank * count : (rank + 1) * count]
            array[...] = inputs[rank] if place == "host" else comm.xp.asarray(inputs[rank])
        else:
            out, array = places.empty(place, n * count), only_read(places.array(place, inputs[rank]))
        comm.all_gather(array, out, wire=dtype).wait()
        assert_same_bits(out, np.concatenate(inputs), (count, place, in_place))


def check_overlap(comm: Communicator, n: int, rank: int) -> None:
    """A part and its whole in one memory, at offsets that differ by rank.

    A rank whose part is its own part of the whole, or beside it, gets the right bits. Any other one is refused before
    anything is sent, in words that name the cure; the others wait until it has called again.
    """
    for i, (gathers, count, place) in enumerate(
        itertools.product((False, True), (1, 5, 1_500, 33_001), ("ordinary", "wire", "host"))
    ):
        if place == "host" and comm.xp is np:
            continue
        if place == "wire":
            memory = comm.empty((n + 2) * count)
        else:
            memory = (np if place == "host" else comm.xp).empty((n + 2) * count, np.float32)
        own = (1 + rank) * count
        begins = [own, 0, own + 1, (n + 1) * count, own - 1, own + count, own - count, count, n * count]
        begins.append(own + count // 2)
        for step in range(len(begins)):
            begin = begins[(3 * rank + i + step) % len(begins)]
            part, whole = memory[begin : begin + count], memory[count : (n + 1) * count]
            source, out = (part, whole) if gathers else (whole, part)
            inputs = all_values(comm, source.size, "float32", salt=i)
            memory[...] = -1
            source[...] = inputs[rank] if place == "host" else comm.xp.asarray(inputs[rank])
            start = comm.all_gather if gathers else comm.reduce_scatter
            refused = begin != own and 0 < begin < (n + 1) * count
            if refused:
                with pytest.raises(UsageError, match=r"overlap.*pass a copy.*\.copy\(\)"):
                    start(source, out)
                assert_same_bits(source, inputs[rank], "nothing has happened")
            start(source.copy() if refused else source, out).wait()
            if gathers:
                assert_same_bits(out, np.concatenate(inputs), (count, place, begin))
            else:
                mine = slice(rank * count, (rank + 1) * count)
                expected = scattered(comm, n * count, "float32", salt=i)[mine]
                assert_reduced(comm, "float32", out, expected, [one[mine] for one in inputs], (count, place, begin))
    # Parts of an exchange are only read, and results are never the caller's memory.
    memory = comm.xp.asarray(values(rank, 9_000, "float32"))
    gathered = comm.all_gather_ragged(memory[rank : 5_000 + rank])
    received = comm.all_to_all_ragged([memory[(rank + r) % 3 : 2_000 * r + 7] for r in range(n)])
    for q, (whole, part) in enumerate(zip(arrived(gathered), arrived(received), strict=True)):
        theirs = values(q, 9_000, "float32")
        assert_same_bits(whole, theirs[q : 5_000 + q], q)
        assert_same_bits(part, theirs[(q + rank) % 3 : 2_000 * rank + 7], q)
    comm.barrier()


def check_all_gather_ragged(comm: Communicator, n: int, rank: int, dtype: str) -> None:
    places = Places(comm, dtype, 3 * max(FEW_SIZES) + n)
    # Counts that grow with the rank, fall with it, and leave all but one rank with nothing.
    for count, place in itertools.product(FEW_SIZES, places.names):
        kinds = [(count * (q % 3) + q, count // (q + 1), count * (q == n - 1)) for q in range(n)]
        for counts in map(list, zip(*kinds, strict=True)):
            inputs = [values(q, counts[q], dtype) for q in range(n)]
            array = only_read(places.array(place, inputs[rank]))
            with comm.together():
                works = [comm.all_gather_ragged(array), comm.all_gather_ragged(array, counts=counts)]
            for work in works:
                for part, expected in zip(arrived(work), inputs, strict=True):
                    assert_same_bits(part, expected, (counts, place))
                    part[...] = 0  # the caller's own
            assert_same_bits(array, inputs[rank], "the input is left alone")
            with pytest.raises(UsageError, match="do not fit"):
                comm.all_gather_ragged(array, counts=[count + 1 for count in counts])


def arrived(work: RaggedWork) -> list[Array]:
    """The parts, waited for; they stay the same."""
    assert work.wait() is None
    work.wait()
    deadline = time.monotonic() + 100
    while not work.done():  # a wait of NCCL's returns before the device has got there
        assert time.monotonic() < deadline
    assert work.parts is work.parts
    return work.parts


def check_broadcast(comm: Communicator, n: int, rank: int, dtype: str) -> None:
    places = Places(comm, dtype, max(SIZES))
    for count, place, root in itertools.product((*FEW_SIZES, max(SIZES)), places.names, {0, n - 1}):
        inputs = all_values(comm, count, dtype)
        array = places.array(place, inputs[rank])
        comm.broadcast(array, root, wire=dtype).wait()
        assert_same_bits(array, inputs[root], (count, place, root))


def check_all_to_all_ragged(comm: Communicator, n: int, rank: int) -> None:
    for dtype, count in itertools.product(("float32", "int64"), FEW_SIZES):
        table = [[values(q, (q + 2 * r) % 3 * count + r, dtype, salt=r) for r in range(n)] for q in range(n)]
        received = comm.all_to_all_ragged([only_read(comm.xp.asarray(part)) for part in table[rank]])
        for q, part in enumerate(arrived(received)):
            assert_same_bits(part, table[q][rank], (count, q))
            part[...] = 0  # the caller's own


def check_messages(comm: Communicator, n: int, rank: int) -> None:
    """Of all sizes between all pairs of ranks, waited for in another order than sent; of all types; in a ring."""
    if n > 1 and type(comm)._start_message is Communicator._start_message:
        with pytest.raises(UsageError, match="no messages"):
            comm.send(comm.xp.zeros(3), (rank + 1) % n)
        return
    for start, to in itertools.product((comm.send, comm.receive), (rank, n, -1)):
        with pytest.raises(UsageError, match="messages go to another rank"):
            start(np.zeros(3), to)
    others = [q for q in range(n) if q != rank]
    sizes = (*FEW_SIZES, max(SIZES))
    # Everyone sends everything first, which is more than any buffer holds, and receives the last first.
    sent = [
        comm.send(values(rank, count, "float32", salt=q), q, tag=-i if i % 2 else i << 40)
        for q in others
        for i, count in enumerate(sizes)
    ]
    reduced = np.full(3, rank)
    collective = comm.all_reduce(reduced)
    arrays = []
    for q in others:
        for i, count in reversed(list(enumerate(sizes))):
            array = np.empty(count, np.float32)
            arrays.append((comm.receive(array, q, tag=-i if i % 2 else i << 40), array, q, count))
    for work, array, q, count in arrays:
        assert work.wait() is None
        assert work.done()
        assert work.source == q
        assert_same_bits(array, values(q, count, "float32", salt=rank), (q, count))
    for work in sent:
        work.wait()
    collective.wait()
    assert (reduced == n * (n - 1) // 2).all()
    # Rank 0 receives from any source; messages of each rank stay in order. Of every type.
    for salt, dtype in enumerate(comm.dtypes):
        if rank == 0:
            seen = dict.fromkeys(others, 0)
            for _ in range(3 * len(others)):
                work = comm.receive(array := np.empty(1_001, STORAGE[dtype]), tag=salt, wire=dtype)
                while not work.done():
                    comm.progress()
                expected = values(work.source, 1_001, dtype, salt=salt + seen[work.source])
                assert_same_bits(array, expected, (dtype, work.source))
                seen[work.source] += 1
            assert set(seen.values()) <= {3}
        else:
            for i in range(3):
                comm.send(values(rank, 1_001, dtype, salt=salt + i), 0, tag=salt, wire=dtype)  # the work is not kept
    comm.barrier()
    # A ring, each waiting in turn.
    if n > 1:
        token = np.array([7 if rank == 0 else -1])
        if rank > 0:
            comm.receive(token, rank - 1, tag=9).wait()
            token += rank
        comm.send(token, (rank + 1) % n, tag=9).wait()
        if rank == 0:
            comm.receive(token, n - 1, tag=9).wait()
            assert token[0] == 7 + n * (n - 1) // 2


def check_polls(comm: Communicator, n: int, rank: int) -> None:
    """Ranks that poll, or wait, each for another one of the operations under way, all come to their ends."""
    if n == 1 or type(comm)._start_message is Communicator._start_message:
        return
    to, source, count = (rank + 1) % n, (rank - 1) % n, 40_001  # more than any buffer holds
    for first, waits in [(i, waiter) for i in range(4) for waiter in (None, i % n)]:
        reduced, gathered = np.full(count, float(rank)), np.empty(n * 1_001)
        came = np.empty(count)
        works = [
            comm.all_reduce(reduced),
            comm.send(np.full(count, rank + 0.5), to, tag=first),
            comm.receive(came, source, tag=first),
            comm.all_gather(np.full(1_001, float(rank)), gathered),
        ]
        for step in range(4):
            work = works[(first + rank + step) % 4]
            if waits == rank:
                work.wait()
            deadline = time.monotonic() + 100
            while not work.done():
                time.sleep(0)  # there may be more ranks than cores
                assert time.monotonic() < deadline, (first, waits, step)
        assert (reduced == n * (n - 1) / 2).all()
        assert (came == source + 0.5).all()
        assert (gathered == np.repeat(np.arange(n), 1_001)).all()
    comm.barrier()


def check_subgroups(comm: Communicator, n: int, rank: int) -> None:
    """Of all ranks in another order, of odd and even ones at the same time, of one; and one of one of these."""
    if type(comm)._subgroup is Communicator._subgroup:
        if n == 1:
            with pytest.raises(UsageError, match="no subgroups"):
                comm.subgroup([rank])
        return
    for ranks in ([rank, rank], [(rank + 1) % (n + 1)], [rank, n], []):
        with pytest.raises(UsageError, match="name each member once"):
            comm.subgroup(ranks)
    backwards = comm.subgroup(range(n - 1, -1, -1))
    work = backwards.all_reduce(array := values(rank, 50_001, "float64"))
    halves = comm.subgroup([q for q in range(n) if q % 2 == rank % 2])
    alone = comm.subgroup([rank])
    for group, members in ((halves, list(range(rank % 2, n, 2))), (alone, [rank])):
        assert (group.topology.rank, group.topology.world_size) == (members.index(rank), len(members))
        gathered = np.empty(len(members), np.int64)
        group.all_gather(np.array([rank]), gathered).wait()
        assert gathered.tolist() == members
        group.broadcast(last := np.array([rank]), len(members) - 1).wait()
        assert last[0] == members[-1]
    again = halves.subgroup(range(halves.topology.world_size))
    halves.close()
    again.barrier()
    again.close()
    work.wait()
    expected = reduce_in_rank_order([values(q, 50_001, "float64") for q in range(n)][::-1], "float64", "sum")
    if backwards.by_host_above_bytes is None:
        assert_same_bits(array, expected, "backwards")
    else:
        np.testing.assert_allclose(array, expected, rtol=1e-9, atol=1e-9)
    backwards.close()
    comm.barrier()


SPARSE = {  # counts of a rank
    "equal": lambda rank, size: size // 50,
    "ragged": lambda rank, size: size // 50 * rank,
    "many": lambda rank, size: size // 3 + rank,
    "half": lambda rank, size: size // 2 - rank,
    "all": lambda rank, size: size,
    "one": lambda rank, size: 1 - rank,
    "none": lambda rank, size: 0,
}


def check_sparse_all_reduce(comm: Communicator, n: int, rank: int) -> None:
    """Lists of all densities, so that each way of adding them up is taken; in rank order."""
    for size, density in itertools.product((1, 3, 5003), SPARSE):
        counts = [min(max(SPARSE[density](q, size), 0), size) for q in range(n)]
        expected = np.zeros(size, np.float32)
        lists = []
        for q, count in enumerate(counts):
            indices = np.sort(np.random.default_rng(q).choice(size, count, replace=False)).astype(np.int32)
            lists.append((indices, values(q, count, "float32") * np.float32(10**q)))
            lists[-1][1][::7] = -0.0
            expected[indices] += lists[-1][1] * np.float32(0.3)
        dense = comm.empty(size)
        for _ in range(2):
            sums = sparse_all_reduce(comm, *map(comm.xp.asarray, lists[rank]), dense, counts, scale=0.3)
            assert finish(sums, 30.0) >= 0
            assert_same_bits(dense, expected, (size, density))


def check_not_a_number(comm: Communicator, n: int, rank: int) -> None:
    """NaN wins in max and min wherever it is; infinities survive; 16-bit sums overflow to infinity."""
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 65504.0, 1e-7, -1.0]
    ops = ("max", "min", "sum") if comm.name != "nccl" else ("sum",)  # NCCL passes over NaN in max and min
    for dtype, op in itertools.product(("float32", "float64", "float16"), ops):
        if refused(comm, dtype, op):
            continue
        for count in (8 * 8, 8 * 2048):
            inputs = [np.roll(np.resize(np.array(special, dtype), count), q * 3) for q in range(n)]
            array = comm.xp.array(inputs[rank])
            comm.all_reduce(array, op).wait()
            array = host(array)
            by_host = reduce_by_host(inputs, comm.topology.hosts, dtype, op)
            expected = documented(comm, reduce_in_rank_order(inputs, dtype, op), by_host)
            np.testing.assert_allclose(array, expected, rtol=0 if comm.ordered_sums else 1e-3)
            assert np.isnan(array).any()


def check_find_nonfinite(comm: Communicator, n: int, rank: int) -> None:
    """Every rank hears of the first element of the sum that is not finite; or it is refused."""
    if not comm.finds_nonfinite:
        with pytest.raises(UsageError, match="look for NaN"):
            comm.all_reduce(comm.xp.zeros(3, np.float32), find_nonfinite=True)
        return
    for dtype, op in (("float32", "max"), ("float16", "sum"), ("int32", "sum")):
        with pytest.raises(UsageError, match=f"{op} of {dtype}"):
            comm.all_reduce(comm.xp.zeros(3, dtype), op, find_nonfinite=True)
    reductions: tuple[ReduceOp, ...] = ("sum", "mean")
    for dtype in ("float32", "float64"):
        places = Places(comm, dtype, max(nonfinite.SIZES))
        for count in nonfinite.SIZES:
            for i, inputs in enumerate(nonfinite.planted(n, count, dtype)):
                op, place = reductions[i % 2], places.names[i % 3]
                array = places.array(place, inputs[rank])
                work = comm.all_reduce(array, op, find_nonfinite=True)
                work.wait()
                assert work.nonfinite == nonfinite.at_fault(inputs, dtype), (count, i, place)
                with np.errstate(all="ignore"):
                    expected = reduce_in_rank_order(inputs, dtype, op)
                np.testing.assert_array_equal(host(array), expected, err_msg=f"{count}, {i}, {place}")
        work = comm.all_reduce(places.array("wire", np.full(5, np.nan, dtype)))
        work.wait()
        assert work.nonfinite is None  # not requested


def check_mixed_places(comm: Communicator, n: int, rank: int) -> None:
    """Ranks may differ in where their arrays lie."""
    places = Places(comm, "float32", 100_003)
    for count, shift in itertools.product((1, 1025, 100_003), range(3)):
        array = places.array(places.names[(rank + shift) % len(places.names)], values(rank, count, "float32"))
        comm.all_reduce(array).wait()
        expected = result(comm, count, "float32")
        assert_reduced(comm, "float32", array, expected, all_values(comm, count, "float32"), (count, shift))
        comm.broadcast(array, n - 1).wait()
        parts = arrived(comm.all_gather_ragged(array))
        for part in parts:
            assert_same_bits(part, host(parts[0]), (count, shift))
            assert_reduced(comm, "float32", part, expected, all_values(comm, count, "float32"), (count, shift))


def check_many_outstanding(comm: Communicator, n: int, rank: int) -> None:
    """More operations than any queue holds, of all sizes, some ragged, polled, and waited for in an odd order."""

    def gathered(q: int, i: int) -> Array:
        return values(q, (0, 1, 300, 7_001)[(q + i) % 4] * (i % 5 != 4), "float32", salt=i)

    def sent(q: int, r: int, i: int) -> Array:
        return values(q, (0, 5, 3_001)[(q + 2 * r + i) % 3] * (i % 5 != 3), "int64", salt=i + r)

    wire = comm.empty(150 * 700, "float32")
    started: list[tuple[int, Array, list[Any]]] = []
    at = 0
    for i in range(150):
        count = (i * 37) % 700 if i % 10 else 3000 * (i // 10)
        contents = values(rank, count, "float32", salt=i)
        if i % 2 and count < 700:
            array, at = wire[at : at + count], at + count
            array[...] = comm.xp.asarray(contents)
        else:
            array = comm.xp.asarray(contents)
        works: list[Any] = [comm.all_reduce(array, label=f"bucket {i}")]
        if i % 4 == 0:
            parts = [comm.xp.asarray(sent(rank, r, i)) for r in range(n)]
            works.append(comm.all_gather_ragged(comm.xp.asarray(gathered(rank, i)), label=f"gather {i}"))
            works.append(comm.all_to_all_ragged(parts, label=f"exchange {i}"))
        started.append((i, array, works))
        if i % 17 == 0:
            comm.progress()
    for place, (i, array, works) in enumerate(started[::3] + started[1::3][::-1] + started[2::3]):
        for work in works:
            while place % 2 and not work.done():  # ends without a wait
                time.sleep(0)  # there may be more ranks than cores
        for work in works:
            work.wait()
            work.wait()
            assert work.done() or work is not works[0]  # has been looked at
        expected, inputs = result(comm, array.size, "float32", salt=i), all_values(comm, array.size, "float32", i)
        assert_reduced(comm, "float32", array, expected, inputs, i)
        for q in range(n) if len(works) > 1 else ():
            assert_same_bits(works[1].parts[q], gathered(q, i), (i, q))
            assert_same_bits(works[2].parts[q], sent(q, rank, i), (i, q))


def check_chained(comm: Communicator, n: int, rank: int) -> None:
    """An operation on what an unfinished one writes sees the result of that one."""
    for count in (5, 5_000, 70_001):
        wire = comm.empty(count, "float64")
        for array in (comm.xp.empty(count), wire, np.empty(count)):
            array[...] = (np if isinstance(array, np.ndarray) else comm.xp).arange(count) + rank
            works = [comm.all_reduce(array) for _ in range(3)]
            gathered = (np if isinstance(array, np.ndarray) else comm.xp).empty(n * count)
            works.append(comm.all_gather(array, gathered))
            works[-1].wait()
            expected = (np.arange(count) * n + n * (n - 1) / 2) * n**2
            assert_same_bits(array, expected, count)
            assert_same_bits(gathered, np.tile(expected, n), count)


def check_dropped_work(comm: Communicator, n: int, rank: int) -> None:
    """Neither the work nor the arrays need to be kept by the caller.

    Memory that is dropped is used again at once, on its stream; a collective must not see that.
    """
    for count in (3, 60_000):
        for i in range(50):
            comm.all_reduce(comm.xp.full(count, i, np.float32))
            if i % 5 == 0:
                comm.all_gather_ragged(comm.xp.full(count + rank, rank, np.float32))
                comm.all_to_all_ragged([comm.xp.full(count + r, rank, np.float32) for r in range(n)])
        comm.all_reduce(kept := comm.xp.full(count, rank, np.int64), "max").wait()
        assert (host(kept) == n - 1).all()
    for i in range(20):
        out = comm.xp.empty(5000 * n, np.int32)
        work = comm.all_gather(comm.xp.full(5000, i + rank, np.int32), out)
        comm.xp.full(5000, -1, np.int32)
        work.wait()
        np.testing.assert_array_equal(host(out), np.repeat(i + np.arange(n), 5000))


def check_shapes(comm: Communicator, n: int, rank: int) -> None:
    """Arrays of any shape, and zero dimensions."""
    for shape in ((), (3, 4, 5), (2, 0, 3)):
        for xp in (np, comm.xp):
            array = xp.full(shape, rank + 1, np.float32)
            comm.all_reduce(array, "max").wait()
            assert array.shape == shape
            assert (host(array) == n).all()


def check_bad_arguments(comm: Communicator, n: int, rank: int) -> None:
    """Refused on every rank before anything is sent."""
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("complex64", lambda: comm.all_reduce(np.zeros(4, np.complex64))),
        ("strided", lambda: comm.all_reduce(np.zeros((4, 4), np.float32).T[1:])),
        ("read-only", lambda: comm.all_reduce(read_only)),
        ("read-only", lambda: comm.all_gather(read_only[:0], read_only[:0])),
        ("read-only", lambda: comm.reduce_scatter(read_only[:0], read_only[:0])),
        ("read-only", lambda: comm.broadcast(read_only)),
        ("reduction", lambda: comm.all_reduce(np.zeros(4), "norm")),  # type: ignore[arg-type]
        ("reduction", lambda: comm.reduce_scatter(np.zeros(n), np.zeros(1), "norm")),  # type: ignore[arg-type]
        ("mean", lambda: comm.all_reduce(np.zeros(4, np.int32), "mean")),
        ("the or of|reduction", lambda: comm.all_reduce(np.zeros(4, np.float32), "or")),
        ("parts", lambda: comm.all_gather(np.zeros(4), np.zeros(4 * n + 1))),
        ("parts", lambda: comm.reduce_scatter(np.zeros(4 * n), np.zeros(4, np.float32))),
        ("parts", lambda: comm.all_to_all_ragged([np.zeros(1)] * (n + 1))),
        ("root", lambda: comm.broadcast(np.zeros(4), n)),
        ("travel as", lambda: comm.all_reduce(np.zeros(4, np.float32), wire="bfloat16")),
        ("uint16", lambda: comm.all_reduce(np.zeros(4, np.uint16))),
        ("list cannot", lambda: comm.all_reduce([1.0, 2.0])),
    ]
    big, odd = np.zeros(4, ">f4"), np.zeros(17, np.uint8)[1:].view(np.float32)
    good = np.zeros(4, np.float32)
    for word, array in ((r"big-endian.*astype\(", big), (r"not aligned.*copy\(", odd)):
        attempts += [
            (word, lambda array=array: comm.all_reduce(array)),
            (word, lambda array=array: comm.all_reduce(array, "mean", find_nonfinite=comm.finds_nonfinite)),
            (word, lambda array=array: comm.reduce_scatter(array, good)),
            (word, lambda array=array: comm.reduce_scatter(np.zeros(4 * n, np.float32), array)),
            (word, lambda array=array: comm.all_gather(array, np.zeros(4 * n, np.float32))),
            (word, lambda array=array: comm.all_gather(good[:1], array[:n])),
            (word, lambda array=array: comm.all_gather_ragged(array)),
            (word, lambda array=array: comm.all_to_all_ragged([good] * (n - 1) + [array])),
            (word, lambda array=array: comm.broadcast(array)),
        ]
    if comm.xp is not np:
        zeros = comm.xp.zeros
        attempts += [
            ("one array is NumPy's", lambda: comm.all_gather(zeros(4), np.zeros(4 * n))),
            ("one array is NumPy's", lambda: comm.reduce_scatter(np.zeros(4 * n), zeros(4))),
            ("strided", lambda: comm.all_reduce(zeros((4, 4)).T[1:])),
            ("not aligned", lambda: comm.all_reduce(zeros(17, np.uint8)[1:].view(np.float32))),
        ]
    for word, attempt in attempts:
        with pytest.raises(UsageError, match=word):
            attempt()
    comm.barrier()


def check_empty(comm: Communicator, n: int, rank: int) -> None:
    """Wire memory of every type, zero elements included, in the module asked for; or it is refused."""
    for dtype in comm.dtypes:
        for xp in (None, comm.xp):
            for count in (0, 1, 1_001):
                array = comm.empty(count, dtype, xp=xp)
                assert isinstance(array, comm.xp.ndarray)
                assert array.shape == (count,)
                assert array.dtype == STORAGE[dtype]
                array[...] = comm.xp.asarray(values(rank, count, dtype))
                comm.broadcast(array, wire=dtype).wait()
                assert_same_bits(array, values(0, count, dtype), (dtype, count))
    for words, arguments in (("elements is -1", (-1,)), ("wire type 'complex64'", (3, "complex64"))):
        with pytest.raises(UsageError, match=words):
            comm.empty(*arguments)
    if comm.name != "single":
        text = f"the {comm.name} communicator moves {comm.xp.__name__} arrays, .* another;"
        with pytest.raises(UsageError, match=text):
            comm.empty(3, xp=types.ModuleType("another"))
    comm.barrier()


def check_other_module(comm: Communicator, n: int, rank: int) -> None:
    """Arrays of CuPy where the transport moves NumPy's."""
    if comm.xp is not np or comm.name == "single":
        return
    fake = types.ModuleType("cupy")
    fake.ndarray = type("ndarray", (), {})  # type: ignore[attr-defined]
    text = f"the {comm.name} communicator moves numpy arrays, and these are of cupy;"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", fake)
        with pytest.raises(UsageError, match=text):
            comm.all_reduce(fake.ndarray())


# All functions above that are named so, with every type, or type and reduction, that they ask for.
_CASES: dict[int, list[tuple[Any, ...]]] = {3: [()], 4: [(dtype,) for dtype in DTYPES], 5: COMBINATIONS}
CHECKS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "-".join([name.removeprefix("check_"), *args]): (function, args)
    for name, function in [*globals().items()]
    if name.startswith("check_")
    for args in _CASES[function.__code__.co_argcount]
}
del CHECKS["all_gather_ragged-bfloat16"]  # it sends what arrays are, and none is bfloat16
