"""Tests of a GPU ask for one, whatever `tests/conftest.py` says."""

from __future__ import annotations

import os

import pytest

from distopt.comm.gpu import GpuStack, gpu_stack
from distopt.errors import MissingDependencyError

os.environ["DISTOPT_DEVICE"] = "cuda"


@pytest.fixture(scope="session")
def stack() -> GpuStack:
    """The GPU stack; creates no CUDA context, so that ranks may still be started."""
    try:
        return gpu_stack()
    except MissingDependencyError as error:
        pytest.skip(str(error))
