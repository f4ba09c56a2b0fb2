"""A rank that fails in DDP ends all others, which name it; faults.py has the ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.parametrize("trials", ["1", pytest.param("8", marks=[pytest.mark.slow, pytest.mark.sweep])])
def test_failures_are_named(trials: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.torch.faults", trials],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
