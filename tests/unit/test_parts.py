"""`--part quick`, `rest` and `sweeps` are the suite, and the quick part has every value of every parameter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = "from tests.parts import pytest_addoption, pytest_collection_modifyitems"
SUITE = """
import pytest

@pytest.fixture(params="uv")
def fixture(request): return request.param

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b, c", [(1, 2), (1, 3), (2, 3), (2, 2)])
def test_many(a, b, c, fixture): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_partly_slow(a): pass

@pytest.mark.slow
@pytest.mark.parametrize("a", range(5))
def test_slow(a): pass

@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("a", range(5))
def test_kept(a): pass

@pytest.mark.slow(kept=1)
class TestClass:
    def test_one(self): pass
    def test_other(self): pass

def test_single(): pass

@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=3)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
def test_swept(a, b): pass

@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.sweep])])
def test_partly_swept(a): pass

@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("b", [1, 2])
def test_a_value_is_slower(a, b): pass

@pytest.mark.sweep
@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_swept_but_for_the_quick_part(a): pass
"""


@pytest.fixture
def collect(tmp_path):
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers =\n slow\n sweep\n")

    def collected(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    return collected


def test_the_parts_are_the_suite(collect):
    everything, quick, rest, sweeps = collect(), *(collect("--part", part) for part in ("quick", "rest", "sweeps"))
    assert len(everything) == 24 + 2 + 5 + 5 + 2 + 1 + 12 + 3 + 6 + 2
    assert sorted(quick + rest + sweeps) == sorted(everything)
    swept = [[name for name in part if name.startswith("test_swept[")] for part in (quick, rest, sweeps)]
    assert [len(names) for names in swept] == [1, 3, 8]
    assert {name[-2] for name in swept[1]} == {"0", "1", "2"}, "the rest has many values"
    assert [name for name in sweeps if name not in swept[2]] == [
        "test_partly_swept[3]",
        "test_swept_but_for_the_quick_part[2]",
    ]
    assert collect("--part", "sweeps") == sweeps
    many = [name[name.index("[") + 1 : -1].split("-") for name in quick if name.startswith("test_many")]
    assert {fixture for fixture, *_ in many} == {"u", "v"}
    assert {(b, c) for _, b, c, _ in many} == {("1", "2"), ("1", "3"), ("2", "3"), ("2", "2")}
    assert {a for *_, a in many} == {"0", "1", "2"}
    assert len(many) == 4
    others = [name for name in quick if not name.startswith("test_many")]
    assert others == [
        "test_partly_slow[1]",
        "test_kept[0]",
        "test_kept[1]",
        "TestClass::test_one",
        "TestClass::test_other",
        "test_single",
        "test_swept[0-0]",
        "test_partly_swept[1]",
        "test_partly_swept[2]",
        "test_a_value_is_slower[1-1]",
        "test_a_value_is_slower[2-2]",
        "test_swept_but_for_the_quick_part[1]",
    ]
