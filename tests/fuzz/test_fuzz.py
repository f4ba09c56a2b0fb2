"""A few seconds of every family of random programs."""

import pytest

from tests.fuzz import communicators, operations
from tests.fuzz.search import search


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
