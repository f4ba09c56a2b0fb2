"""The process group against what one process computes, and against Gloo; `checks` has the ranks' side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.parts import values_beside

from .checks import BY_MAKE_TORCH, CHECKS, FAR, GROUPS

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    pytest.param(name, marks=() if name in FAR else pytest.mark.sweep) for name in CHECKS if name not in BY_MAKE_TORCH
]


def outcomes(ranks: str, checks: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """For every check, the errors of all ranks that have got so far."""
    return run([sys.executable, "-W", "ignore", "-m", "tests.torch.checks", ranks], checks)


def run(command: list[str], checks: tuple[str, ...], seconds: float = 560.0) -> dict[str, dict[str, str]]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "CHECKS": ",".join(checks)}
    try:
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:  # the checks that have ended count
        sys.stderr.write((late.stderr or b"").decode())
        return json.loads(((late.stdout or b"{}").decode().rpartition("\n")[0].splitlines() or ["{}"])[-1])
    assert ended.returncode == 0, ended.stderr
    sys.stderr.write(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def expect_no_error(found: dict[str, dict[str, str]], name: str, ranks: str) -> None:
    errors, size = found.get(name, {}), sum(map(int, ranks.split("+")))
    assert len(errors) == size, f"only {len(errors)} of {size} ranks have ended {name}"
    for rank, error in errors.items():
        assert not error, f"rank {rank}\n{error}"


@pytest.mark.parametrize("ranks", ["2", pytest.param("3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_check(request, once, name: str, ranks: str) -> None:
    number, group = next((number, group) for number, group in enumerate(GROUPS) if name in group)
    checks = tuple(each for each in values_beside(request, "name") if each in group)
    expect_no_error(once(f"torch-{ranks}-{number}", outcomes, ranks, checks), name, ranks)


SLOW = """
import time
from tests.torch.checks import CHECKS, __main__ as checks
checks.CHECK_SECONDS = 40.0
CHECKS["hangs"] = lambda ranks: time.sleep(1000 if ranks.rank else 0)
CHECKS["dies"] = lambda ranks: ranks.rank and __import__("os")._exit(3)
checks.main()
"""


@pytest.mark.slow
@pytest.mark.sweep  # of the tests themselves
def test_a_check_that_hangs_or_dies_is_one_failure() -> None:
    names = ("premul_sum", "hangs", "conjugate_tensors", "dies", "all_reduce_of_a_parameter")
    found = run([sys.executable, "-W", "ignore", "-c", SLOW, "2"], names)
    assert [all(found[name][rank] == "" for rank in "01") for name in names] == [True, False, True, False, True]
    assert all(len(errors) == 2 for errors in found.values())
    assert "within 40 s" in found["hangs"]["1"]


def test_checks_that_have_ended_count_where_the_command_is_late() -> None:
    said = (
        """import time; print('{"one": {"0": ""}}', flush=True); print('{"one', end="", flush=True); time.sleep(1000)"""
    )
    assert run([sys.executable, "-c", said], (), 5.0) == {"one": {"0": ""}}
