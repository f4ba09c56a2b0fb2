from __future__ import annotations

import pytest

from distopt.comm.gpu import GpuStack, gpu_stack
from distopt.errors import MissingDependencyError


@pytest.fixture(scope="session")
def stack() -> GpuStack:
    """The GPU stack; creates no CUDA context, so that ranks may still be started."""
    try:
        return gpu_stack()
    except MissingDependencyError as error:
        pytest.skip(str(error))
