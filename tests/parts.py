"""The suite in two parts: `pytest --part quick`, which `make test` runs, and `--part rest`, all that it leaves.

The quick part has every test function that is not marked `slow`. Of one with parameters it has so many cases that every
value of every parameter, fixtures' included, occurs in one of them; which values meet is left to the rest. A test of
which a case takes seconds is marked `slow`, and `slow(kept=1)` if no other touches its feature: the quick part has only
so many of its cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("quick", "rest"), help="run a part of the suite, see tests/parts.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    quick = set(quick_part(items))
    chosen = [item for item in items if (item in quick) == (part == "quick")]
    config.hook.pytest_deselected(items=[item for item in items if (item in quick) != (part == "quick")])
    items[:] = chosen


def quick_part(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    by_function = defaultdict(list)
    for item in items:
        if kept(item):
            by_function[item.nodeid.partition("[")[0]].append(item)
    quick: list[pytest.Item] = []
    for cases in by_function.values():
        covering = [cases[i] for i in cover([values_of(case) for case in cases])]
        quick += [case for i, case in enumerate(covering) if i < kept(case)]
    return quick


def values_of(item: pytest.Item) -> frozenset[Hashable]:
    """Place and name of each parameter's value, or row of several; an item without parameters has itself."""
    callspec = getattr(item, "callspec", None)
    # Private; but `callspec.indices` knows no rows, and in `callspec.id` a hyphen may be part of a name.
    return frozenset(enumerate(callspec._idlist)) if callspec else frozenset([item.nodeid])


def kept(item: pytest.Item) -> float:
    """How many cases of this one's function the quick part may have."""
    slow = item.get_closest_marker("slow")
    return slow.kwargs.get("kept", 0) if slow else float("inf")


def values_beside(request: pytest.FixtureRequest, name: str) -> tuple[Any, ...]:
    """Values of the parameter `name` in the cases of this test that run and have its other values.

    For tests that start ranks once for several cases.
    """
    own = request.node.callspec.params
    cases = cases_of(request.session)[request.function]
    return tuple(case[name] for case in cases if all(case[other] == own[other] for other in own if other != name))


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
