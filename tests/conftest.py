from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from distopt import autograd
from tests.parts import pytest_addoption, pytest_collection_modifyitems  # noqa: F401 - hooks
from tests.processes import heed_signals

if TYPE_CHECKING:
    from benchmarks.networks.emulation import TwoHosts

# On a machine with GPUs, too: the tests of a GPU, which are in tests/gpu, ask for one.
os.environ.setdefault("DISTOPT_DEVICE", "cpu")
heed_signals()


@pytest.fixture(autouse=True)
def evaluation_mode() -> Iterator[None]:
    """Training mode is a switch of the whole process, as in SINGA; no test may leave it on for the next."""
    yield
    autograd.training = False


@pytest.fixture(scope="module")
def net() -> Iterator[TwoHosts]:
    """Two hosts, which are network namespaces of this machine, with the MPI of mpi4py between them. Needs root."""
    pytest.importorskip("mpi4py", reason="mpi4py is absent: pip install 'distopt[mpi]'", exc_type=ImportError)
    from benchmarks.networks.emulation import HostsUnavailableError, two_hosts

    try:
        with two_hosts() as made:
            yield made
    except HostsUnavailableError as error:
        pytest.skip(f"no second host: {error}")
