"""`python -m benchmarks kernels`: the table and a small real run."""

import json

import pytest

from benchmarks import kernels
from benchmarks.__main__ import main
from distopt import _core


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
