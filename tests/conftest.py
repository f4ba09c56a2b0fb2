from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from distopt import autograd

# On a machine with GPUs, too: the tests of a GPU, which are in tests/gpu, ask for one.
os.environ.setdefault("DISTOPT_DEVICE", "cpu")
# A shell lets what it starts with "&" ignore SIGINT, and programs inherit that; tests send it to programs of theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def evaluation_mode() -> Iterator[None]:
    """Training mode is a switch of the whole process, as in SINGA; no test may leave it on for the next."""
    yield
    autograd.training = False
