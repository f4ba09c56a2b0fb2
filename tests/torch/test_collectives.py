"""The process group against what one process computes, and against Gloo; `checks` has the ranks' side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.parts import values_beside

from .checks import BY_MAKE_TORCH, CHECKS

ROOT = Path(__file__).resolve().parents[2]


def outcomes(ranks: str, checks: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """For every check, the errors of all ranks that have got so far."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.checks", ranks]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CHECKS": ",".join(checks)}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=560)
    assert ended.returncode == 0, ended.stderr
    sys.stderr.write(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def expect_no_error(found: dict[str, dict[str, str]], name: str, ranks: str) -> None:
    errors, size = found.get(name, {}), sum(map(int, ranks.split("+")))
    assert len(errors) == size, f"only {len(errors)} of {size} ranks have ended {name}"
    for rank, error in errors.items():
        assert not error, f"rank {rank}\n{error}"


@pytest.mark.parametrize("ranks", ["2", pytest.param("3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in BY_MAKE_TORCH])
def test_check(request, once, name: str, ranks: str) -> None:
    expect_no_error(once(f"torch-{ranks}", outcomes, ranks, values_beside(request, "name")), name, ranks)
