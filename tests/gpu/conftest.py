"""Tests of a GPU ask for one, whatever `tests/conftest.py` says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distopt.comm.gpu import GpuStack, gpu_stack
from distopt.errors import MissingDependencyError


@pytest.fixture(scope="module", autouse=True)
def gpu_asked_for() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTOPT_DEVICE", "cuda")
        yield


@pytest.fixture(scope="session")
def stack() -> GpuStack:
    """The GPU stack; creates no CUDA context, so that ranks may still be started."""
    try:
        return gpu_stack()
    except MissingDependencyError as error:
        pytest.skip(str(error))
