"""`python -m benchmarks kernels`: the table and a small real run."""

import json

import pytest

from benchmarks import kernels
from benchmarks.__main__ import main
from distopt import _core


def test_ratios_are_to_the_read_and_to_distopt():
    samples = {
        ("read", "distopt"): [1e-3, 9e-3, 1e-3],
        ("top-K", "distopt"): [2e-3],
        ("top-K", "torch"): [8e-3],
        ("cast", "torch"): [4e-3],
    }
    found = [line.split() for line in kernels.lines(samples)]
    assert found == [
        ["read", "distopt", "1.000", "1.00", "1.00"],
        ["top-K", "distopt", "2.000", "2.00", "1.00"],
        ["top-K", "torch", "8.000", "8.00", "4.00"],
        ["cast", "torch", "4.000", "4.00", "-"],
    ]


@pytest.mark.parametrize("isa", _core.supported_isas())
def test_a_small_real_run(tmp_path, capsys, isa):
    path = tmp_path / "out.json"
    assert main(f"kernels --count 5000 --ratio 0.01 -n 3 --isa {isa} --json {path}".split()) == 0
    report = json.loads(path.read_text())
    assert (report["count"], report["k"], report["isa"]) == (5000, 50, isa)
    assert all(len(row["seconds"]) == 3 for row in report["rows"])
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) == len(report["rows"])
    assert len({len(line) for line in [*lines, *kernels._HEADER.splitlines()]}) == 1
