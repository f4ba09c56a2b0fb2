"""The process group against what one process computes, and against Gloo; `checks.py` has the ranks' side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("torch")
from tests.parts import values_beside

from .checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]


def outcomes(size: int, checks: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """For every check, the errors of all ranks that have got so far."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "tests.torch.checks", str(size), f"{folder}/store"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "CHECKS": ",".join(checks)}
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_check(request, once, name: str, size: int) -> None:
    found = once(f"torch-{size}", outcomes, size, values_beside(request, "name")).get(name, {})
    assert len(found) == size, f"only {len(found)} of {size} ranks have ended {name}"
    for rank, error in found.items():
        assert not error, f"rank {rank}\n{error}"
