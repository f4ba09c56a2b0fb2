"""Whatever goes wrong on one rank, wherever: the others end within seconds, say why, and leave nothing behind.

`tests.faults.cases.run` states what must hold; `tests.faults.job` is the job.
"""

from __future__ import annotations

import os
import random
import sys
from itertools import product

import pytest

from tests.processes import Program

from .cases import MISTAKES, Case, can_mount, full_memory, run

STARTS = [("main", "shm"), ("raw", "shm"), ("mpiexec", "shm"), ("mpiexec", "mpi")]
PLACES = ("start", "inside", "between")
ENDS = ("SIGKILL", "raise", "sys.exit", "os._exit")
OUTSIDE = ("parent", "interrupt")


def possible(case: Case) -> bool:
    if case.fault == "model":
        return case.place == "start"
    if case.fault == "unseen":
        return case.start == "mpiexec"
    if case.fault in MISTAKES:
        # MPI needs no shared memory of ours.
        return case.place != "start" and (case.fault, case.backend) != ("shm full", "mpi")
    return True


def matrix() -> list[Case]:
    """Every fault at every place on every transport at 2 ranks, thinned out where starts share what they test."""
    cases = [Case(*start, fault, place) for start, fault, place in product(STARTS, ENDS, PLACES)]
    cases += [Case(*start, fault, "inside") for start, fault in product(STARTS, OUTSIDE)]
    cases += [Case(*start, "stop", place) for start, place in zip(STARTS, (*PLACES, "inside"), strict=True)]
    cases += [Case(*start, "pause", place) for start, place in zip(STARTS, ("between", *PLACES), strict=True)]
    cases += [Case(*start, fault, "between") for start, fault in product((STARTS[1], STARTS[3]), MISTAKES)]
    cases += [Case(*start, "model", "start") for start in (STARTS[0], STARTS[3])]
    # More ranks: those that are neither the first nor the lost one, and a first rank that is lost.
    cases += [Case(*start, "SIGKILL", "inside", 4, 2) for start in STARTS]
    cases += [Case(*start, "raise", place, 4, 0) for start, place in zip(STARTS, (*PLACES, "inside"), strict=True)]
    cases += [Case(*STARTS[1], "SIGKILL", "start", 4, 2), Case(*STARTS[1], "os._exit", "start", 2, 0)]
    cases += [Case(*STARTS[0], "SIGSEGV", "between"), Case(*STARTS[1], "skip", "inside", 4, 3)]
    cases += [Case(*STARTS[3], fault, "launch") for fault in ("stop", "os._exit")]
    cases += [Case(*start, "unseen", place) for start, place in product(STARTS[2:], ("launch", *PLACES))]
    return [case for case in cases if possible(case)]


@pytest.mark.parametrize("case", matrix(), ids=str)
def test_fault(case: Case) -> None:
    run(case)


@pytest.mark.skipif(not can_mount(), reason="mounting a full /dev/shm takes privileges")
def test_full_dev_shm_does_not_matter() -> None:
    script = [sys.executable, "-m", "tests.faults.job", "main", "none", "between", "2", "-1", "0"]
    ended = Program(full_memory() + script).end()
    assert (ended.code, ended.stdout.count(" finished"), ended.stderr) == (0, 2, "")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_random_faults(part: int) -> None:
    """200 faults drawn at random, ten in each part."""
    seed = int(os.environ.get("DISTOPT_TEST_SEED", random.randrange(2**32)))
    rng = random.Random(f"{seed} {part}")
    trials = [draw(rng) for _ in range(10)]
    failures = []
    for case in trials:
        try:
            run(case)
        except AssertionError as error:  # noqa: PERF203 - one failure must not hide the next
            failures.append(f"{case}: {error}")
    assert not failures, f"DISTOPT_TEST_SEED={seed}, {len(failures)} of {len(trials)}:\n" + "\n\n".join(failures)


def draw(rng: random.Random) -> Case:
    while True:
        fault = rng.choice([*ENDS * 3, *OUTSIDE, *MISTAKES, "pause", "SIGSEGV", "unseen"])
        size = rng.choice((2, 2, 3, 4))
        # What others see of a mistake of rank 0 is that they all differ from it.
        rank = rng.randrange(1 if fault in MISTAKES else 0, size)
        case = Case(*rng.choice(STARTS), fault, rng.choice(PLACES), size, rank, rng.uniform(0.0, 0.4))
        if possible(case):
            return case
