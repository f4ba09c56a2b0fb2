from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def asks_for_the_gpu(monkeypatch):
    """The rest of the suite runs on the CPU wherever it runs, see tests/conftest.py."""
    monkeypatch.setenv("DISTOPT_DEVICE", "cuda")
