"""A few seconds of every family of random programs."""

import logging

import pytest

from tests.fuzz import codecs, communicators, messages, operations
from tests.fuzz.search import search

RANKS_START = [pytest.param(family, marks=pytest.mark.slow) for family in (communicators, messages)]


@pytest.mark.parametrize("family", [*RANKS_START, codecs, operations], ids=lambda family: family.__name__[11:])
def test_random_programs(family, monkeypatch, caplog):
    caplog.set_level(logging.ERROR, "distopt")  # as codecs.py does; at the end it is what it was before
    jobs = [("shm", 2), ("small", 3)]
    if family in (communicators, messages):
        monkeypatch.setattr(family, "PROGRAMS", family.programs(jobs))
        for backend, ranks in jobs:  # the time is that of programs, once the ranks are there
            if family is messages:
                messages.run(messages.Program(backend, ranks, False, 0, ()))
            else:
                members = {"world": tuple(range(ranks))}
                communicators.run(communicators.Program(backend, "int32", False, members, 0, ()))
    found = search(family, 35, 1.5, least=4)
    communicators.close()
    messages.close()
    assert found.program is None, found.script(family)
    assert found.programs > 3
