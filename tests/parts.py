"""The suite in three parts: `pytest --part quick`, which `make test` runs, `--part rest` and `--part sweeps`.

The quick part has every test function that is not marked `slow`. Of one with parameters it has so many cases that every
value of every parameter, fixtures' included, occurs in one of them; which values meet is left to the rest. A test of
which a case takes seconds is marked `slow`, and `slow(kept=1)` if no other touches its feature: the quick part has only
so many of its cases.

The rest, which continuous integration runs as well, has all others but for tests marked `sweep(rest=3)`, or
`slow(kept=1, rest=3)`, whose many cases take minutes: of them it has so many, drawn once and for all. The sweeps are
what is left; run them before a release.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("quick", "rest", "sweeps"), help="run a part of the suite, see tests/parts.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    quick = set(quick_part(items))
    sweeps = set(sweeps_of([item for item in items if item not in quick]))
    parts = {item: "quick" if item in quick else "sweeps" if item in sweeps else "rest" for item in items}
    config.hook.pytest_deselected(items=[item for item in items if parts[item] != part])
    items[:] = [item for item in items if parts[item] == part]


def quick_part(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    by_function = defaultdict(list)
    for item in items:
        if kept(item):
            by_function[function_of(item)].append(item)
    quick: list[pytest.Item] = []
    for cases in by_function.values():
        covering = [cases[i] for i in cover([values_of(case) for case in cases])]
        quick += [case for i, case in enumerate(covering) if i < kept(case)]
    return quick


def sweeps_of(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Of the cases that the quick part leaves, those that the rest leaves."""
    by_function = defaultdict(list)
    for item in items:
        if kept(item, "sweep", "rest") < float("inf"):
            by_function[function_of(item)].append(item)
    sweeps: list[pytest.Item] = []
    for function, cases in by_function.items():
        random.Random(function).shuffle(cases)
        first = cover([values_of(case) for case in cases])  # many values, if not all
        order = [*first, *sorted({*range(len(cases))} - {*first})]
        sweeps += [cases[i] for place, i in enumerate(order) if place >= kept(cases[i], "sweep", "rest")]
    return sweeps


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def values_of(item: pytest.Item) -> frozenset[Hashable]:
    """Place and name of each parameter's value, or row of several; an item without parameters has itself."""
    callspec = getattr(item, "callspec", None)
    # Private; but `callspec.indices` knows no rows, and in `callspec.id` a hyphen may be part of a name.
    return frozenset(enumerate(callspec._idlist)) if callspec else frozenset([item.nodeid])


def kept(item: pytest.Item, marker: str = "slow", count: str = "kept") -> float:
    """How many cases of this one's function the quick part may have; or, by the other marker, the rest.

    A mark of a parameter's value counts before that of the function, and that before the file's.
    """
    marks = [mark for mark in item.iter_markers() if mark.name == marker or count in mark.kwargs]
    own = [mark for mark in item.own_markers if mark in marks]  # those of values come last
    found = own[-1:] or marks[:1]
    return found[0].kwargs.get(count, 0) if found else float("inf")


def cases_beside(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Values of the parameters `names` in the cases of this test that run and have its other values.

    For tests that start ranks once for several cases.
    """
    own = request.node.callspec.params
    cases = cases_of(request.session)[request.function]
    beside = [case for case in cases if all(case[other] == own[other] for other in own if other not in names)]
    return [tuple(case[name] for name in names) for case in beside]


def values_beside(request: pytest.FixtureRequest, name: str) -> tuple[Any, ...]:
    """`cases_beside` of one parameter."""
    return tuple(value for (value,) in cases_beside(request, name))


@cache
def cases_of(session: pytest.Session) -> dict[Any, list[dict[str, Any]]]:
    found = defaultdict(list)
    for item in session.items:
        if callspec := getattr(item, "callspec", None):
            found[item.function].append(callspec.params)  # type: ignore[attr-defined]
    return found


def cover(cases: Sequence[frozenset[Hashable]]) -> list[int]:
    """Indices of cases that together have all values: each time the first with most of the missing ones."""
    missing = set().union(*cases)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(missing & cases[i]))
        chosen.append(best)
        missing -= cases[best]
    return chosen
