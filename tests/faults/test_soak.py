"""A small part of `python -m tests.faults.soak`."""

import pytest

from tests.processes import Program

from .soak import PARTS, Sample, command, growth


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("part", PARTS)
def test_jobs_and_collectives_with_errors_leave_nothing(part, tmp_path):
    count = 10 if part == "jobs" else 1000
    ended = Program(command(part, count, tmp_path)).end()
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count(f"{count:,} ") >= 1
    assert not ended.stderr


def test_growth_is_told():
    flat = [Sample(50_000 + number % 3 * 900, 9, 2, 0) for number in range(10)]
    assert growth(flat) == ""
    grown = growth([*flat, Sample(54_000, 10, 2, 1)])
    assert grown == "resident_kib from 51800 to 54000, descriptors from 9 to 10, files from 0 to 1"
    assert growth([*flat, Sample(54_000, 9, 2, 0)], kept_kib=200) == ""
    assert growth([Sample(70_000, 30, 8, 4), *flat]) == ""  # what a process has at first does not count
