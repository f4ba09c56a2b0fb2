"""Programs of collectives and messages in flight together, on views that overlap, over every transport of the CPU."""

from __future__ import annotations

import atexit
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from distopt.comm.base import DTYPES, OPS, RaggedWork
from distopt.errors import UsageError
from tests.conformance.oracle import STORAGE, bfloat16_from, bfloat16_to, reduce_in_rank_order

from .ranks import BACKENDS, TIMEOUT, Ranks

__all__ = ["Call", "Message", "Program", "Wait", "run"]

SIZE = 3000  # elements of every rank's memory
FLOATS = ("float32", "float64", "float16", "bfloat16")
PRIVATE = 1  # the value that a rank sends from an array of its own, after its memory was refused


class Call(NamedTuple):
    """A collective. Places of arrays in the memory are modulo what fits, and rank r has `at[r]`.

    Attributes:
        name: of the method of the communicator.
        count: number of elements; of ragged arrays, the largest.
        at: of the array.
        out: of the result, where there is another array for it; None: in place.
        op: reduction, or the root of a broadcast modulo the number of ranks.
        sub: whether it is one of the subgroup.
    """

    name: str
    count: int
    at: tuple[int, ...]
    out: tuple[int, ...] | None = None
    op: Any = "sum"
    sub: bool = False


class Message(NamedTuple):
    """A message of rank `source` to rank `to`, modulo the number of ranks; `anyone`: the receiver names no source."""

    source: int
    to: int
    count: int
    at: int
    tag: int
    anyone: bool


class Wait(NamedTuple):
    """A wait for operation number `which` of those under way, on the ranks in `ranks` ("all" where it is collective).

    Attributes:
        how: "wait", "poll" once, or "spin": poll to the end.
    """

    which: int
    ranks: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class Program:
    backend: str
    ranks: int
    dtype: str
    wire: bool  # whether the memory is wire memory
    group: tuple[int, ...]  # ranks of a subgroup, in its order; empty: none
    seed: int  # of the values, and of the order in which what is left is waited for
    steps: tuple[Call | Message | Wait, ...]


def _pair(name: str, count: int, at: tuple[int, ...], out: tuple[int, ...] | None, beside: bool, op: str,
          sub: bool) -> Call:  # fmt: skip
    """A call whose result lies at `out`, or so far from the array."""
    if out is not None and beside:
        out = tuple(max(0, a + o) for a, o in zip(at, out, strict=True))
    return Call(name, count, at, out, op, sub)


# -- programs ----------------------------------------------------------------------------------------------------------
_offsets = st.tuples(*[st.integers(0, 40) | st.integers(0, SIZE)] * 5)
_beside = st.tuples(*[st.integers(-40, 700)] * 5)  # how far from the array its result begins
_counts = st.sampled_from([0, 1, 2, 7, 33, 200, 555])
_calls = st.one_of(
    st.builds(Call, st.just("all_reduce"), _counts, _offsets, st.none(), st.sampled_from(list(OPS)), st.booleans()),
    st.builds(_pair, st.just("reduce_scatter"), _counts, _offsets, st.none() | _beside | _offsets, st.booleans(),
              st.sampled_from(list(OPS)), st.booleans()),
    st.builds(_pair, st.just("all_gather"), _counts, _offsets, st.none() | _beside | _offsets, st.booleans(),
              st.just("sum"), st.booleans()),
    st.builds(Call, st.sampled_from(["all_gather_ragged", "all_to_all_ragged"]), _counts, _offsets, st.none(),
              st.just("sum"), st.booleans()),
    st.builds(Call, st.just("broadcast"), _counts, _offsets, st.none(), st.integers(0, 4), st.booleans()),
    st.builds(Call, st.just("barrier"), st.just(0), _offsets, st.none(), st.just("sum"), st.booleans()),
)  # fmt: skip
_rank = st.integers(0, 4)
_messages = st.builds(Message, _rank, _rank, _counts, st.integers(0, SIZE), st.integers(-1, 2), st.booleans())
_waits = st.builds(Wait, st.integers(0, 9), st.lists(_rank, unique=True).map(tuple),
                   st.sampled_from(["wait", "poll", "spin"]))  # fmt: skip


@st.composite
def programs(draw: Any, jobs: Sequence[tuple[str, int]]) -> Program:
    """Programs for some of the jobs, backend and number of ranks."""
    backend, ranks = draw(st.sampled_from(jobs))
    dtype = draw(
        st.sampled_from(
            list(DTYPES) if backend in ("shm", "small", "mpi", "mpi_small") else ["float64", "int32", "bool"]
        )
    )
    group = draw(st.just(()) | st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(tuple))
    steps = draw(st.lists(_calls | _calls | _messages | _waits, max_size=12))
    bad = ("and", "or", "xor") if dtype in FLOATS else ("mean",)
    steps = [s._replace(op="max") if isinstance(s, Call) and s.op in bad else s for s in steps]
    return Program(backend, ranks, dtype, draw(st.booleans()), group, draw(st.integers(0, 999)), tuple(steps))


PROGRAMS = programs([(backend, n) for backend, sizes in BACKENDS.items() for n in sizes])


# -- what both the ranks and the oracle compute ------------------------------------------------------------------------
def _memory(program: Program, rank: int, place: int) -> np.ndarray:
    """Memory number `place`: 0 of the world, 1 of the subgroup, 2 what messages are sent from."""
    rng = np.random.default_rng([program.seed, place, rank])
    values = rng.standard_normal(SIZE) * 2
    if program.backend in ("blocks", "round_robin") or program.dtype not in FLOATS:
        values = np.floor(values)  # any order of sums gives the same
    if program.dtype == "bfloat16":
        return bfloat16_from(values)
    return (values if program.dtype in FLOATS else values.astype(int)).astype(program.dtype)


def _members(program: Program, call: Call) -> tuple[int, ...]:
    return program.group if call.sub and program.group else tuple(range(program.ranks))


def _place(at: int, size: int) -> slice:
    first = at % (SIZE - size + 1)
    return slice(first, first + size)


def _counts_of(call: Call, members: tuple[int, ...], rank: int) -> list[int]:
    """How many elements rank `rank` sends to each member; to all the same, in a gather."""
    if call.name == "all_gather_ragged":
        return [(call.count + 7 * rank + call.at[0]) % (call.count + 1)]
    return [(call.count // 3 + 5 * rank + 3 * other + call.at[1]) % (call.count + 1) for other in members]


def _sides(call: Call, members: tuple[int, ...], rank: int) -> tuple[slice, slice]:
    """Where in the memory a rank's array, and its result, lie."""
    own, n = members.index(rank), len(members)
    sizes = {"reduce_scatter": (n, 1), "all_gather": (1, n)}.get(call.name, (1, 1))
    if call.out is not None or sizes == (1, 1):
        out = call.at if call.out is None else call.out
        return _place(call.at[rank], sizes[0] * call.count), _place(out[rank], sizes[1] * call.count)
    whole = _place(call.at[rank], n * call.count)
    part = slice(whole.start + own * call.count, whole.start + (own + 1) * call.count)
    return (whole, part) if call.name == "reduce_scatter" else (part, whole)


# -- a rank ------------------------------------------------------------------------------------------------------------
class Answer(NamedTuple):
    """Memories at the end, the results of ragged collectives and messages by step, and which steps were refused."""

    memories: list[np.ndarray]
    results: dict[int, list[np.ndarray]]
    refused: set[int]
    has_group: bool


def on_rank(comm: Any, program: Program) -> Answer:
    rank = comm.topology.rank
    memories = [_memory(program, rank, place) for place in range(3)]
    if program.wire:
        wire = comm.empty(SIZE, program.dtype)
        wire[...] = memories[0]
        memories[0] = wire
    answer = Answer(memories, {}, set(), bool(program.group))
    group = None
    if rank in program.group:
        try:
            group = comm.subgroup(program.group)
        except UsageError:
            answer = answer._replace(has_group=False)
    works: list[tuple[int, Any, Any]] = []  # step, work, where a result comes
    order = random.Random(program.seed + rank if not program.group else program.seed)
    for number, step in enumerate(program.steps):
        if isinstance(step, Wait):
            _wait_for(works, program, step, rank)
        elif isinstance(step, Message):
            source, to = step.source % program.ranks, step.to % program.ranks
            tag = 1000 + number if step.anyone else step.tag
            wire = {"wire": program.dtype}
            if rank == source != to:
                works.append((number, comm.send(memories[2][_place(step.at, step.count)], to, tag=tag, **wire), None))
            elif rank == to != source:
                came = np.full(step.count, 0, STORAGE[program.dtype])
                work = comm.receive(came, None if step.anyone else source, tag=tag, **wire)
                works.append((number, work, came))
            else:
                works.append((number, None, None))
        elif rank not in _members(program, step) or (step.sub and program.group and not answer.has_group):
            works.append((number, None, None))
        else:
            on = group if step.sub and program.group else comm
            works.append(_start(on, program, number, step, rank, memories[on is group], answer))
    for number, work, _ in works:
        if isinstance(work, RaggedWork):
            work.wait()
            answer.results[number] = [np.array(part) for part in work.parts]
    order.shuffle(works)
    for number, work, came in works:
        if work is not None:
            work.wait()
        if came is not None:
            answer.results[number] = [came]
    comm.barrier()
    if group is not None:
        group.close()
    return answer._replace(memories=[memory.copy() for memory in memories])


def _start(on: Any, program: Program, number: int, call: Call, rank: int, memory: np.ndarray, answer: Answer) -> Any:
    members = _members(program, call)
    wire = {"wire": program.dtype}
    array, out = (memory[side] for side in _sides(call, members, rank))
    if call.name == "barrier":
        return number, on.barrier(), None
    if call.name.endswith("ragged"):
        if program.dtype == "bfloat16":
            memory = memory.view(np.int16)
        counts = _counts_of(call, members, rank)
        parts = [memory[_place(call.at[(rank + i) % 5], count)] for i, count in enumerate(counts)]
        return number, on.all_to_all_ragged(parts) if "to_all" in call.name else on.all_gather_ragged(*parts), None
    if call.name == "broadcast":
        return number, on.broadcast(array, call.op % len(members), **wire), None
    if call.name == "all_reduce":
        return number, on.all_reduce(array, call.op, **wire), None
    options = {"op": call.op, **wire} if call.name == "reduce_scatter" else wire
    try:
        return number, getattr(on, call.name)(array, out, **options), None
    except UsageError:
        assert np.shares_memory(array, out), "a call is refused whose arrays share no memory"
        answer.refused.add(number)
        return number, getattr(on, call.name)(np.full_like(array, PRIVATE), out.copy(), **options), None


def _wait_for(works: list[Any], program: Program, step: Wait, rank: int) -> None:
    """All members wait where a wait is collective, or where it could be for a rank in another communicator."""
    if not works:
        return
    _, work, _ = works[step.which % len(works)]
    if work is None or not (program.group or isinstance(work, RaggedWork) or rank in step.ranks):
        return
    if step.how == "wait":
        work.wait()
        return
    deadline = time.monotonic() + TIMEOUT
    while not work.done() and step.how == "spin":
        assert time.monotonic() < deadline, f"done() of {work} never says so"


# -- the oracle --------------------------------------------------------------------------------------------------------
def _expected(program: Program, answers: list[Answer]) -> list[Answer]:
    """What every rank must have: one step after the other."""
    expected = [Answer([_memory(program, rank, place) for place in range(3)], {}, set(), True)
                for rank in range(program.ranks)]  # fmt: skip
    for number, step in enumerate(program.steps):
        if isinstance(step, Message):
            source, to = step.source % program.ranks, step.to % program.ranks
            if source != to:
                sent = expected[source].memories[2][_place(step.at, step.count)]
                expected[to].results[number] = [sent]
        elif isinstance(step, Call):
            members = _members(program, step)
            sub = bool(step.sub and program.group)
            if not sub or all(answers[rank].has_group for rank in members):
                _call(program, number, step, members, {r: expected[r] for r in members}, answers, sub)
    return expected


def _call(program: Program, number: int, call: Call, members: tuple[int, ...], expected: dict[int, Answer],
          answers: list[Answer], sub: bool) -> None:  # fmt: skip
    memories = {rank: expected[rank].memories[sub] for rank in members}
    if call.name.endswith("ragged"):
        parts = {r: [memories[r][_place(call.at[(r + i) % 5], count)].copy()
                     for i, count in enumerate(_counts_of(call, members, r))] for r in members}  # fmt: skip
        for own, rank in enumerate(members):
            expected[rank].results[number] = [parts[r][own if "to_all" in call.name else 0] for r in members]
        return
    sides = {rank: _sides(call, members, rank) for rank in members}
    arrays = [memories[rank][sides[rank][0]].copy() for rank in members]
    for i, rank in enumerate(members):
        if number in answers[rank].refused:
            arrays[i][...] = PRIVATE
    if call.name in ("all_reduce", "reduce_scatter"):
        result = reduce_in_rank_order(arrays, program.dtype, call.op)
    elif call.name == "broadcast":
        result = arrays[call.op % len(members)]
    else:
        result = np.concatenate(arrays)
    for i, rank in enumerate(members):
        if call.name != "barrier" and number not in answers[rank].refused:
            own = slice(i * call.count, (i + 1) * call.count) if call.name == "reduce_scatter" else slice(None)
            memories[rank][sides[rank][1]] = result[own]


_started: dict[tuple[str, int], Ranks] = {}


def run(program: Program) -> None:
    """Check what the ranks of a real communicator have against the oracle."""
    key = program.backend, program.ranks
    if key not in _started:
        _started[key] = Ranks(*key, "tests.fuzz.communicators:on_rank")
    try:
        answers = _started[key].run(program)
    except Exception:
        _started.pop(key).kill()  # which may no longer be in step
        raise
    for rank, (answer, expected) in enumerate(zip(answers, _expected(program, answers), strict=True)):
        for place, (memory, values) in enumerate(zip(answer.memories, expected.memories, strict=True)):
            _compare(program, memory, values, f"memory {place} of rank {rank}")
        assert answer.results.keys() == expected.results.keys(), f"rank {rank} has results of other steps"
        for number, arrays in answer.results.items():
            for part, (array, values) in enumerate(zip(arrays, expected.results[number], strict=True)):
                _compare(program, array, values, f"part {part} of step {number} on rank {rank}")


def _compare(program: Program, array: np.ndarray, values: np.ndarray, what: str) -> None:
    if program.dtype == "bfloat16":
        array, values = (bfloat16_to(a.view(np.uint16)) for a in (array, values))
    equal = np.array_equal(array, values, equal_nan=program.dtype in FLOATS)
    if not equal and program.dtype == "float64" and program.backend in ("blocks", "round_robin"):
        equal = np.allclose(array, values, 1e-12, 0, equal_nan=True)
    if not equal:
        assert array.shape == values.shape, f"{what} is of shape {array.shape}, not {values.shape}"
        bad = np.flatnonzero(array != values)
        raise AssertionError(f"{what} is wrong at {bad[:8]}: {array[bad[:8]]}, not {values[bad[:8]]}")


@atexit.register
def close() -> None:
    """End all ranks."""
    while _started:
        _started.popitem()[1].kill()
