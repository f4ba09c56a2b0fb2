"""A few seconds of every family of random programs; and that a search finds what is wrong, and shrinks it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import codecs, communicators, operations
from tests.fuzz.search import search

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", [communicators, codecs, operations], ids=lambda family: family.__name__[11:])
def test_random_programs(family, monkeypatch) -> None:
    monkeypatch.setattr(communicators, "PROGRAMS", communicators.programs([("shm", 2), ("small", 3)]))
    if family is communicators:  # the time is that of programs, once the ranks are there
        for backend, ranks in (("shm", 2), ("small", 3)):
            communicators.run(communicators.Program(backend, ranks, "int32", False, (), 0, ()))
    found = search(family, 35, 3.0)
    communicators.close()
    assert found.program is None, found.script(family)
    assert found.programs > 3


def test_a_wrong_gradient_is_found_and_shrinks_to_a_script(monkeypatch) -> None:
    name, (_, right) = "relu", operations.OPERATIONS["relu"]
    monkeypatch.setitem(operations.OPERATIONS, name, (lambda a, b: a + 0.0, right))
    found = search(operations, 35, 60.0)
    assert found.program is not None
    assert [step.name for step in found.program.steps] == ["relu"]
    assert not found.program.late
    script = found.script(operations)
    assert "AssertionError: the loss is" in script
    # The product is right, so what the script runs passes.
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert compile(script, "script", "exec")


def test_a_residual_that_is_lost_is_found(monkeypatch) -> None:
    train = codecs._train

    def forgetful(comm, program):
        records = train(comm, program)
        for record in records:
            for bucket in record.buckets:
                for residual in bucket.after.values():
                    residual *= np.float32(0.5)
        return records

    monkeypatch.setattr(codecs, "_train", forgetful)
    found = search(codecs, 35, 60.0)
    assert "mean and residual" in found.error
    assert len(found.program.steps) == 1
