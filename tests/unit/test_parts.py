"""`--part quick`, `rest` and `sweeps` are the suite, and the quick part has every value of every parameter."""

import os
import subprocess
import sys

import pytest

from tests.processes import ROOT

PLUGIN = "from tests.parts import pytest_addoption, pytest_collection_modifyitems"
SUITE = """
import pytest
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b, c", [(1, 2), (1, 3), (2, 3), (2, 2)])
def test_many(a, b, c): pass
@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("b", [1, 2])
def test_kept(a, b): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.slow(kept=1, rest=3)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
def test_swept(a, b): pass
@pytest.mark.slow(kept=1, rest=2)
@pytest.mark.parametrize("a", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.sweep(rest=9))])
def test_both(a): pass
"""


@pytest.mark.slow
def test_the_parts_are_the_suite(tmp_path):
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers =\n slow\n sweep\n")

    def collect(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    quick, rest, sweeps = (collect("--part", part) for part in ("quick", "rest", "sweeps"))
    assert len({*quick, *rest, *sweeps}) == len([*quick, *rest, *sweeps]) == 12 + 6 + 1 + 12 + 5
    many = [name[name.index("[") + 1 : -1].split("-") for name in quick if name.startswith("test_many")]
    assert {(b, c) for b, c, _ in many} == {("1", "2"), ("1", "3"), ("2", "3"), ("2", "2")}
    assert {a for *_, a in many} == {"0", "1", "2"}
    assert len(many) == 4
    assert quick[4:] == ["test_kept[1-1]", "test_kept[2-2]", "test_swept[0-0]", "test_both[1]"]
    swept = [name for name in rest if name.startswith("test_swept")]
    assert {name[-2] for name in swept} == {"0", "1", "2"}, "the rest has many values"
    assert len(swept) == 3
    assert "test_slow" in rest
    assert "test_both[5]" in rest
    assert len([name for name in rest if name.startswith("test_both")]) == 3
