"""Any fault of one rank, at any place: the others end within seconds, say why, and leave nothing behind.

`instruments.faults.kinds` states what must come of each kind of fault; `python -m instruments.faults` makes many more
trials.
"""

import os
import random
from itertools import islice, product

import pytest

from instruments.faults.__main__ import draw
from instruments.faults.kinds import BETWEEN, INSIDE, KINDS, LAUNCH, START
from instruments.faults.soak import PARTS, command
from instruments.faults.trials import Trial, run
from instruments.faults.ways import WAYS, possible_ways
from instruments.fuzz import communicators, operations
from instruments.fuzz.search import search
from tests.processes import Program

# DISTOPT_TEST_SEED draws others.
SEED = int(os.environ.get("DISTOPT_TEST_SEED", "17"))
DRAWN = list(islice(draw(random.Random(SEED), KINDS, WAYS), 60))  # each kind at least once


def matrix() -> list[Trial]:
    """Fixed trials, not drawn: ends with and without a message, at each place on each transport of one host."""
    one_host = [name for name, way in WAYS.items() if way.hosts == 1]
    trials = [Trial(*case) for case in product(("SIGKILL", "exception"), one_host, (START, BETWEEN, INSIDE))]
    # More ranks: those that are neither the first nor the lost one, and a first rank that is lost.
    trials += [Trial("SIGKILL", name, INSIDE, 4, 2) for name in one_host]
    trials += [Trial("exception", name, INSIDE, 3, 0) for name in one_host]
    trials += [Trial(kind, "mpiexec mpi", LAUNCH) for kind in ("SIGSTOP", "os._exit 3")]
    trials += [Trial(kind, "hosts hier", INSIDE, 4) for kind in ("link down", "packets lost", "exception")]
    # Which connections break depends on when they last spoke.
    trials += [Trial("short outage", "hosts run", INSIDE, delay=delay) for delay in (0.05, 0.15, 0.25)]
    return trials


def check(trial: Trial, request: pytest.FixtureRequest) -> None:
    if trial.way not in possible_ways(hosts=True):
        pytest.skip("connects ranks on several hosts by MPICH only")
    net = request.getfixturevalue("net") if WAYS[trial.way].hosts == 2 else None
    outcome = run(trial, net)
    assert not outcome.faults, outcome.output


@pytest.mark.slow(kept=1, rest=6)
@pytest.mark.parametrize("trial", matrix(), ids=str)
def test_fault(trial: Trial, request) -> None:
    check(trial, request)


@pytest.mark.slow(rest=6)
@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_drawn_fault(number: int, request) -> None:
    trial = DRAWN[number]
    print(f"DISTOPT_TEST_SEED={SEED} {trial}")
    check(trial, request)


def test_a_job_without_a_fault_is_not_taken_for_one_that_ends(tmp_path):
    """The trials can fail: here nothing goes wrong, and all that must come of a fault is missing."""
    outcome = run(Trial("os._exit 0", "main", "nowhere"))
    assert outcome.ends_well
    assert "2 ranks finished" in outcome.faults
    assert "no fault came" in outcome.faults


# -- what remains of many jobs and collectives -------------------------------------------------------------------------
@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("part", PARTS)
def test_jobs_and_collectives_with_errors_leave_nothing(part, tmp_path):
    count = 10 if part == "jobs" else 1000
    ended = Program(command(part, count, tmp_path)).end(code=0)
    assert ended.stdout.count(f"{count:,} ") >= 1
    assert not ended.stderr


# -- a few seconds of every family of random programs ---------------------------------------------------------------
@pytest.mark.parametrize(
    "family", [pytest.param(communicators, marks=pytest.mark.slow), operations], ids=lambda family: family.__name__[11:]
)
def test_random_programs(family, monkeypatch):
    if family is communicators:
        jobs = [("shm", 2), ("small", 3)]
        monkeypatch.setattr(family, "PROGRAMS", family.programs(jobs))
        for transport, ranks in jobs:  # the time is that of programs, once the ranks are there
            members = {"world": tuple(range(ranks))}
            communicators.run(communicators.Program(transport, "int32", False, members, 0, ()))
    found = search(family, 35, 1.5, least=4)
    communicators.close()
    assert found.program is None, found.script(family)
    assert found.programs > 3
