from __future__ import annotations

from collections.abc import Iterator

import pytest

from distopt import autograd


@pytest.fixture(autouse=True)
def evaluation_mode() -> Iterator[None]:
    """Training mode is a switch of the whole process, as in SINGA; no test may leave it on for the next."""
    yield
    autograd.training = False
