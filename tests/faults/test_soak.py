"""A small part of `python -m tests.faults.soak`."""

import pytest

from tests.processes import Program

from .soak import PARTS, command


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("part", PARTS)
def test_jobs_and_collectives_with_errors_leave_nothing(part, tmp_path):
    count = 10 if part == "jobs" else 1000
    ended = Program(command(part, count, tmp_path)).end()
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count(f"{count:,} ") >= 1
    assert not ended.stderr
