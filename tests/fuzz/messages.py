"""Programs of messages whose two ends may differ in size, type or tag, beside collectives, over shared memory and MPI.

What comes must be what was sent; else every rank that fails raises one error, which names a rank.
"""

import atexit
import random
import re
import threading
from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from distopt.errors import CommunicatorError

from .ranks import TIMEOUT, Ranks

JOBS = [*product(["shm"], [2, 3]), *product(["small"], [3]), *product(["mpi"], [2, 3])]
IMPATIENT = 0.5  # seconds that a rank waits where a message may have no other end
PROGRAMS_OF_MPI = 100  # by the same ranks: MPI has a limit of communicators, and those that have failed are not freed


class End(NamedTuple):
    count: int
    dtype: str
    tag: int


class Message(NamedTuple):
    ranks: tuple[int, int]  # from, to
    sent: End
    awaited: End
    anyone: bool  # whether the receiver names no source


class Sum(NamedTuple):
    count: int


@dataclass(frozen=True)
class Program:
    backend: str
    ranks: int
    threads: bool  # whether each message is waited for in a thread of its own
    seed: int  # of the orders in which ranks start messages, and wait
    steps: tuple[Message | Sum, ...]

    @property
    def is_right(self):
        """Whether any message to a rank with a tag suits any receive of it."""
        ends = {}
        for message in self.messages:
            for end in (message.sent, message.awaited):
                ends.setdefault((message.ranks[1], end.tag), set()).add((end, message.anyone))
        return all(m.sent == m.awaited for m in self.messages) and all(len(each) == 1 for each in ends.values())

    @property
    def messages(self):
        return [step for step in self.steps if isinstance(step, Message)]


@st.composite
def programs(draw, jobs):
    """Programs for some of the jobs; half are for the first, as ranks start slowly."""
    backend, ranks = draw(st.just(jobs[0]) | st.sampled_from(jobs))
    ends = st.builds(
        End, st.sampled_from([0, 1, 3, 4, 700, 50_000]), st.sampled_from(["float32", "int32", "float64", "int8"]),
        st.integers(0, 3),
    )  # fmt: skip
    one = st.sampled_from(range(ranks))
    pairs = st.tuples(one, one).filter(lambda pair: pair[0] != pair[1])
    right = st.tuples(pairs, ends, st.booleans()).map(lambda drawn: Message(drawn[0], drawn[1], *drawn[1:]))
    wrong = st.builds(Message, pairs, ends, ends, st.booleans())
    steps = st.lists(right | right | wrong | st.builds(Sum, st.sampled_from([1, 3, 60_000])), max_size=8).map(tuple)
    threads = draw(st.booleans()) if backend != "mpi" else False
    return Program(backend, ranks, threads, draw(st.integers(0, 999)), draw(steps))


PROGRAMS = programs(JOBS)


# -- a rank ------------------------------------------------------------------------------------------------------------
def on_rank(world, program):
    """By step and side, -1 of a sum: whether it has succeeded, and what it has written or the text of the error."""
    comm, found = world.subgroup(range(program.ranks)), {}
    try:
        works = _start(comm, program, found)
        if program.threads:
            threads = [threading.Thread(target=_end, args=(program, found, *work)) for work in works if work[0][1] >= 0]
            for thread in threads:
                thread.start()
            works = [work for work in works if work[0][1] < 0]
        for work in works:
            _end(program, found, *work)
        for thread in threads if program.threads else ():
            thread.join()
    finally:
        world.barrier()  # nobody leaves while others wait
        comm.close()
    return found


def _start(comm, program, found):
    """What has been started in a random order, for `_end`, in another one."""
    rank, order = comm.topology.rank, random.Random(program.seed + comm.topology.rank)
    keys = [
        (number, side)
        for number, step in enumerate(program.steps)
        for side in ((-1,) if isinstance(step, Sum) else (0, 1))
        if side < 0 or step.ranks[side] == rank
    ]
    places = sorted(order.sample(range(len(keys)), sum(side < 0 for _, side in keys)))
    sums, messages = [key for key in keys if key[1] < 0], [key for key in keys if key[1] >= 0]
    order.shuffle(messages)
    works = []
    for place in range(len(keys)):
        key = number, side = (sums if place in places else messages).pop(0)
        step = program.steps[number]
        try:
            if isinstance(step, Sum):
                array = np.ones(step.count)
                work = comm.all_reduce(array)
            else:
                count, dtype, tag = step.awaited if side else step.sent
                array = np.full(count, 0 if side else number + 1, dtype)
                source = None if step.anyone else step.ranks[0]
                work = comm.receive(array, source, tag=tag) if side else comm.send(array, step.ranks[1], tag=tag)
            works.append((key, work, array))
            if order.random() < 0.3:
                works[order.randrange(len(works))][1].done()
        except CommunicatorError as error:
            found.setdefault(key, (False, str(error)))
    order.shuffle(works)
    return works


def _end(program, found, key, work, array):
    try:
        work.wait(TIMEOUT if program.is_right else IMPATIENT)
        found[key] = True, array
    except CommunicatorError as error:
        found[key] = False, str(error)
        if key[1] >= 0:  # later calls say the same
            try:
                ended = work.done()
                # MPI itself moves what has begun, also after a failure.
                found[key] = (True, array) if ended and program.backend == "mpi" else (False, f"{error}, then {ended}")
            except CommunicatorError as again:
                if str(again) != str(error):
                    found[key] = False, f"{error}, then {again}"


# -- what must hold ----------------------------------------------------------------------------------------------------
def _check(program, found):
    errors = [{what for ok, what in of.values() if not ok} for of in found]
    assert not (program.is_right and any(errors)), f"errors of a right program: {errors}"
    assert all(len(of) <= 1 for of in errors), f"ranks raise different errors: {errors}"
    if program.backend != "mpi":
        assert len(set().union(*errors)) <= 1, f"ranks raise different errors: {errors}"
    assert all(re.search(r"rank \d \(host .*, pid \d+\)", text) for of in errors for text in of), errors
    came = []
    for rank, of in enumerate(found):
        for (number, side), (ok, array) in of.items():
            if not ok or side == 0:
                continue
            if side < 0:
                assert (array == program.ranks).all(), f"the sum {number} of rank {rank} is {array}"
                continue
            step = program.steps[number]
            suits = [n for n, other in enumerate(program.steps) if isinstance(other, Message)
                     and other.ranks[1] == rank and other.sent == step.awaited
                     and (step.anyone or other.ranks[0] == step.ranks[0])]  # fmt: skip
            values = set(array.tolist())
            assert len(values) <= 1, f"receive {number} of rank {rank} is {array}"
            assert values <= {n + 1 for n in suits}, f"receive {number} of rank {rank} is {array}, not of {suits}"
            came += values
    assert len(came) == len(set(came)), f"a message has come twice: {came}"


_started: dict = {}
_runs: Counter = Counter()


def run(program):
    """Check what real ranks have."""
    key = program.backend, program.ranks
    if key not in _started or (program.backend == "mpi" and _runs[key] % PROGRAMS_OF_MPI == 0):
        if key in _started:
            _started.pop(key).kill()
        _started[key] = Ranks(*key, "tests.fuzz.messages:on_rank")
    _runs[key] += 1
    try:
        found = _started[key].run(program)
    except Exception:
        _started.pop(key).kill()  # which may no longer be in step
        raise
    _check(program, found)


@atexit.register
def close():
    """End all ranks."""
    while _started:
        _started.popitem()[1].kill()
