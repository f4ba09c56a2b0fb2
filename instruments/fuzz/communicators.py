"""Programs of collectives and messages in flight together, on views that overlap, over every transport of the CPU."""

import atexit
import random
import time
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from hypothesis import strategies as st

from distopt.comm.base import DTYPES, OPS, RaggedWork
from distopt.errors import UsageError
from tests.conformance.oracle import STORAGE, bfloat16_from, bfloat16_to, reduce_in_rank_order

from .ranks import TIMEOUT, Ranks

SIZE = 3000  # elements of every memory of a rank; places of arrays in it are modulo what fits
FLOATS = ("float32", "float64", "float16", "bfloat16")
BY_HOST = ("blocks", "round_robin")  # transports that sum host by host
# Transports and numbers of ranks: shared memory and MPI with their usual and with small chunks, and both.
JOBS = [*product(["shm"], [2, 1, 3, 4, 5]), *product(["small"], [2, 3, 5]), *product(["mpi", "mpi_small"], [2, 3]),
        *product(BY_HOST, [4])]  # fmt: skip
PAIRS = ("reduce_scatter", "all_gather")  # whose array and result are a part and a whole
CALLS = ("all_reduce", *PAIRS, *PAIRS, "all_gather_ragged", "all_to_all_ragged", "broadcast", "barrier")
PRIVATE = 1  # the value that a rank sends from an array of its own, after its memory was refused


class Call(NamedTuple):
    """A collective, the method `name`."""

    name: str
    on: str  # a key of `Program.members`, and of a memory
    count: int  # elements of the array, or of a part; of ragged arrays, at most
    at: tuple[int, ...]  # by rank, where the array lies; the whole, of a pair
    out: tuple[int, ...] | None  # by rank, where the part lies in the whole, in quarters of a part; None: in place
    op: Any


class Message(NamedTuple):
    ends: tuple[int, int]  # from rank, to rank
    count: int
    at: int
    tag: int
    anyone: bool  # whether the receiver names no source


class Wait(NamedTuple):
    which: int  # operation of those so far, modulo their number
    ranks: tuple[int, ...]  # who waits; all where it is collective
    how: str  # "wait", "poll" once, or "spin": poll to the end


@dataclass(frozen=True)
class Program:
    transport: str
    dtype: str
    wire: bool  # whether the memory of the world is wire memory
    members: dict[str, tuple[int, ...]]  # ranks of the "world" and, where there is one, of a "subgroup", in its order
    seed: int  # of the values, and of the order in which what is left is waited for
    steps: tuple[Call | Message | Wait, ...]


@st.composite
def programs(draw, jobs):
    """Programs for some of the jobs, transport and number of ranks; half are for the first, as ranks start slowly."""
    transport, ranks = draw(st.just(jobs[0]) | st.sampled_from(jobs))
    dtype = draw(st.sampled_from(["float64", "int32", "bool"] if transport in BY_HOST else list(DTYPES)))
    members, world = {"world": tuple(range(ranks))}, st.sampled_from(range(ranks))
    if draw(st.booleans()):
        members["subgroup"] = draw(st.lists(world, min_size=1, unique=True).map(tuple))
    ops = [op for op in OPS if op not in (("and", "or", "xor") if dtype in FLOATS else ("mean",))]
    counts, offsets = st.sampled_from([0, 1, 2, 7, 33, 200, 555]), st.integers(0, 40) | st.integers(0, SIZE)
    out = st.tuples(*[st.integers(-6, 18)] * ranks)
    calls = st.builds(
        Call, st.sampled_from(CALLS), st.sampled_from(list(members)), counts, st.tuples(*[offsets] * ranks),
        out | out | st.none(), st.sampled_from(ops),
    )  # fmt: skip
    ends = st.tuples(world, world).filter(lambda pair: pair[0] != pair[1])
    messages = st.builds(Message, ends, counts, offsets, st.integers(-1, 2), st.booleans())
    waits = st.builds(Wait, st.integers(0, 9), st.lists(world, unique=True).map(tuple),
                      st.sampled_from(["wait", "poll", "spin"]))  # fmt: skip
    steps = st.lists(calls | calls | waits | messages if ranks > 1 else calls | waits, max_size=12).map(tuple)
    return Program(transport, dtype, draw(st.booleans()), members, draw(st.integers(0, 999)), draw(steps))


PROGRAMS = programs(JOBS)


# -- what both the ranks and the oracle compute ------------------------------------------------------------------------
# Of a rank: the memories of the "world", of the "subgroup" and for "messages"; what came otherwise, by step and part;
# and by step, whether the rank's arguments were refused.
State: TypeAlias = dict[Any, Any]


def _at_first(program, rank):
    values = np.random.default_rng([program.seed, rank]).standard_normal((3, SIZE)) * 2
    if program.transport in BY_HOST or program.dtype not in FLOATS:
        values = np.floor(values)  # any order of sums gives the same
    if program.dtype == "bfloat16":
        values = bfloat16_from(values)
    else:
        values = (values if program.dtype in FLOATS else values.astype(int)).astype(program.dtype)
    return dict(zip(("world", "subgroup", "messages"), values, strict=True))


def _place(at, size):
    first = at % (SIZE - size + 1)
    return slice(first, first + size)


def _sides(program, call, rank):
    """Where a rank's array lies, and its result, and whether they overlap otherwise than in place."""
    if call.name not in PAIRS:
        both = _place(call.at[rank], call.count)
        return both, both, False
    members = program.members[call.on]
    own, whole = members.index(rank), _place(call.at[rank], len(members) * call.count)
    part = _place(whole.start + (4 * own if call.out is None else call.out[rank]) * call.count // 4, call.count)
    overlap = part.start < whole.stop and whole.start < part.stop and part.start != whole.start + own * call.count
    return (whole, part, overlap) if call.name == "reduce_scatter" else (part, whole, overlap)


def _pieces(program, call, rank):
    """Where the arrays lie that a rank sends in a ragged collective: one to each member or, in a gather, to all."""
    receivers = program.members[call.on][: None if call.name == "all_to_all_ragged" else 1]
    counts = [(call.count + 7 * rank + 3 * other + call.at[0]) % (call.count + 1) for other in receivers]
    return [_place(call.at[rank] + 50 * i, count) for i, count in enumerate(counts)]


# -- a rank ------------------------------------------------------------------------------------------------------------
def on_rank(comm, program):
    rank, state = comm.topology.rank, _at_first(program, comm.topology.rank)
    if program.wire:
        state["world"], values = comm.empty(SIZE, program.dtype), state["world"]
        state["world"][...] = values
    comms, subgroup = {"world": comm}, program.members.get("subgroup", ())
    if rank in subgroup:
        comms["subgroup"] = comm.subgroup(subgroup)
    works = []  # of all operations so far; None where there is nothing to wait for
    for number, step in enumerate(program.steps):
        if isinstance(step, Call):
            members = program.members[step.on]
            works.append((number, _start(comms[step.on], program, number, step, state) if rank in members else None))
        elif isinstance(step, Message):
            works.append((number, _start_message(comm, program, number, step, state) if rank in step.ends else None))
        elif works:
            work = works[step.which % len(works)][1]
            # All wait where a wait is collective, or where it could be for a rank in another communicator.
            if work is not None and (subgroup or isinstance(work, RaggedWork) or rank in step.ranks):
                _wait(work, step.how)
    ragged = [(number, work) for number, work in works if isinstance(work, RaggedWork)]
    random.Random(program.seed + (0 if subgroup else rank)).shuffle(works)
    for number, work in ragged + works:
        if work is not None:
            work.wait()
        if isinstance(work, RaggedWork):
            state |= {(number, part): np.array(array) for part, array in enumerate(work.parts)}
    comm.barrier()
    if rank in subgroup:
        comms["subgroup"].close()
    return {what: np.array(array) for what, array in state.items()}


def _start_message(comm, program, number, message, state):
    (source, to), tag = message.ends, 1000 + number if message.anyone else message.tag
    if comm.topology.rank == source:
        return comm.send(state["messages"][_place(message.at, message.count)], to, tag=tag, wire=program.dtype)
    state[number, 0] = np.zeros(message.count, STORAGE[program.dtype])
    return comm.receive(state[number, 0], None if message.anyone else source, tag=tag, wire=program.dtype)


def _start(comm, program, number, call, state):
    members, memory, start = program.members[call.on], state[call.on], getattr(comm, call.name)
    rank = members[comm.topology.rank]
    if call.name == "barrier":
        return start()
    if call.name.endswith("ragged"):
        memory = memory.view(np.int16) if program.dtype == "bfloat16" else memory
        parts = [memory[piece] for piece in _pieces(program, call, rank)]
        return start(parts) if call.name == "all_to_all_ragged" else start(*parts)
    array, out = (memory[side] for side in _sides(program, call, rank)[:2])
    more = {"broadcast": [call.at[0] % len(members)], "all_gather": []}.get(call.name, [call.op])
    if call.name not in PAIRS:
        return start(array, *more, wire=program.dtype)
    try:
        work, state[number] = start(array, out, *more, wire=program.dtype), False
    except UsageError:
        work, state[number] = start(np.full_like(array, PRIVATE), out.copy(), *more, wire=program.dtype), True
    return work


def _wait(work, how):
    if how == "wait":
        work.wait()
        return
    deadline = time.monotonic() + TIMEOUT
    while not work.done() and how == "spin":
        assert time.monotonic() < deadline, f"done() of {work} never says so"


# -- the oracle --------------------------------------------------------------------------------------------------------
def _expected(program):
    """Every rank's expected end state: one step after the other."""
    states = [_at_first(program, rank) for rank in program.members["world"]]
    for number, step in enumerate(program.steps):
        if isinstance(step, Message):
            source, to = (states[rank] for rank in step.ends)
            to[number, 0] = source["messages"][_place(step.at, step.count)]
        elif isinstance(step, Call) and step.name != "barrier":
            (_ragged if step.name.endswith("ragged") else _collective)(program, number, step, states)
    return states


def _ragged(program, number, call, states):
    members = program.members[call.on]
    sent = [[states[rank][call.on][piece].copy() for piece in _pieces(program, call, rank)] for rank in members]
    for own, rank in enumerate(members):
        states[rank] |= {(number, part): arrays[own % len(arrays)] for part, arrays in enumerate(sent)}


def _collective(program, number, call, states):
    members = program.members[call.on]
    sides, arrays = [_sides(program, call, rank) for rank in members], []
    for rank, (array, _, refused) in zip(members, sides, strict=True):
        sent = states[rank][call.on][array]
        arrays.append(np.full_like(sent, PRIVATE) if refused else sent.copy())
    if call.name in ("all_reduce", "reduce_scatter"):
        result = reduce_in_rank_order(arrays, program.dtype, call.op)
    else:
        result = np.concatenate(arrays) if call.name == "all_gather" else arrays[call.at[0] % len(members)]
    results = np.split(result, len(members)) if call.name == "reduce_scatter" else [result] * len(members)
    for rank, (_, out, refused), own in zip(members, sides, results, strict=True):
        if call.name in PAIRS:
            states[rank][number] = refused
        if not refused:
            states[rank][call.on][out] = own


_started = {}


def run(program):
    """Check what the ranks of a real communicator have against the oracle."""
    key = program.transport, len(program.members["world"])
    if key not in _started:
        _started[key] = Ranks(*key, "instruments.fuzz.communicators:on_rank")
    try:
        states = _started[key].run(program)
    except Exception:
        _started.pop(key).kill()  # which may no longer be in step
        raise
    expected = _expected(program)
    refused = [
        [{step for step in of if isinstance(step, int) and of[step]} for of in some] for some in (states, expected)
    ]
    assert refused[0] == refused[1], f"by rank, steps {refused[0]} are refused, not {refused[1]}"
    for rank, (state, values) in enumerate(zip(states, expected, strict=True)):
        assert state.keys() == values.keys(), f"rank {rank} has results of other steps"
        for what, array in state.items():
            _compare(program, array, values[what], f"{what} of rank {rank}")


def _compare(program, array, values, what):
    if program.dtype == "bfloat16" and array.ndim:
        array, values = (bfloat16_to(a.view(np.uint16)) for a in (array, values))
    if program.dtype == "float64" and program.transport in BY_HOST:
        np.testing.assert_allclose(array, values, 1e-12, err_msg=what)
    else:
        np.testing.assert_array_equal(array, values, what)


@atexit.register
def close():
    """End all ranks."""
    while _started:
        _started.popitem()[1].kill()
