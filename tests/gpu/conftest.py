"""Tests of a GPU ask for one, whatever `tests/conftest.py` says."""

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


@pytest.fixture
def isa() -> None:
    """Tests of the CPU, collected here, ask for an instruction set."""


@pytest.fixture
def dtype() -> str:
    """The only one of the GPU's layers."""
    return "float32"


@pytest.fixture
def hosted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of `tests/unit/test_ops.py`, collected here, run the kernels of the GPU."""
    from tests.gpu.hosted import hosted

    monkeypatch.setattr("tests.unit.test_ops.cpu", hosted)
