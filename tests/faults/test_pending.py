"""The kinds of fault of which what must come does not come yet: they are tried here, and not drawn."""

from __future__ import annotations

import pytest

from .backends import BACKENDS, possible_backends
from .kinds import BETWEEN, INSIDE, KINDS, PENDING, START
from .trials import Trial, run

CASES = (
    ("item 1: when all ranks raise, one that the agent has ended is named", Trial("all raise", "run", BETWEEN, 3, 1)),
    ("item 4: distopt run hears no signal while its output is not read", Trial("output not read", "run", BETWEEN)),
    (
        "item 4: distopt run hears no signal while its output is not read",
        Trial("output not read", "hosts run", BETWEEN),
    ),
    ("item 5: output on a full disk ends the job", Trial("output on a full disk", "run", START)),
    ("item 5: output on a full disk ends the job", Trial("output on a full disk", "hosts run", BETWEEN)),
)


def check(trial: Trial, request: pytest.FixtureRequest) -> None:
    if trial.backend not in possible_backends(hosts=True):
        pytest.skip("connects ranks on several hosts by MPICH only")
    outcome = run(trial, request.getfixturevalue("net") if BACKENDS[trial.backend].hosts == 2 else None)
    assert not outcome.faults, f"{outcome.faults}\n{outcome.output[-4000:]}"


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(trial, marks=pytest.mark.xfail(strict=True, reason=reason), id=str(trial))
        for reason, trial in CASES
    ],
)
def test_fault(trial: Trial, request) -> None:
    check(trial, request)


@pytest.mark.slow
@pytest.mark.xfail(
    strict=False,  # which connections break depends on when they last spoke
    reason="item 6: an outage that the agents' connection outlives, but not the ranks', ends the job without a reason",
)
@pytest.mark.parametrize("delay", [0.05, 0.15, 0.25])
def test_short_outage(delay: float, request) -> None:
    check(Trial("short outage", "hosts run", INSIDE, delay=delay), request)


def test_no_kind_is_both_drawn_and_pending() -> None:
    assert not set(KINDS) & set(PENDING)
    assert {trial.kind for _, trial in CASES} | {"short outage"} == set(PENDING)
