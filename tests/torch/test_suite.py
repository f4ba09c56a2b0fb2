"""PyTorch's own tests, which pass with Gloo, over the backend; see suite.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_passes_with_gloo_passes(ranks: int) -> None:
    command = [sys.executable, "-W", "ignore", str(HERE / "suite.py"), "--ranks", str(ranks), "--backends", "distopt"]
    command += ["--expect", str(HERE / "passes.txt"), "--verbose"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert ended.returncode == 0, ended.stdout + ended.stderr
