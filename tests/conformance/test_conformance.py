"""Every communicator of one host against the oracle, at 1, 2, 3 and 4 ranks."""

from importlib.util import find_spec

import pytest

from tests.parts import values_beside

from .checks import CHECKS
from .ranks import assert_passed, needs_ucx, run_ranks
from .run import run_checks

SWEPT = [pytest.mark.slow, pytest.mark.sweep]
WITH_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="torch is absent: pip install torch")
SMALL_CHUNKS = "tests.conformance.ranks:SmallChunkCommunicator"
SEVERAL_HOSTS = "tests.conformance.ranks:OverGlooOfHosts"
LEFT_OUT = {SEVERAL_HOSTS: ("subgroups",)}
JOBS = [
    ("shm", 2),
    pytest.param("shm", 1, marks=pytest.mark.sweep),
    ("shm", 3),
    ("single", 1),
    pytest.param("tests.conformance.ranks:OverUcx", 2, marks=needs_ucx),
    pytest.param("tests.conformance.ranks:OverUcx", 3, marks=[needs_ucx, *SWEPT]),
    pytest.param("tests.conformance.ranks:OverUcxByHost", 4, marks=[needs_ucx, *SWEPT]),
    (SMALL_CHUNKS, 3),
    pytest.param("tests.conformance.ranks:OverGloo", 2, marks=WITH_TORCH),
    *(pytest.param(SEVERAL_HOSTS, size, marks=[WITH_TORCH, needs_ucx, *SWEPT]) for size in (3, 4)),
    *(pytest.param(*job, marks=SWEPT) for job in (("shm", 4), (SMALL_CHUNKS, 2), (SMALL_CHUNKS, 4))),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("transport", "world_size"), JOBS, ids=lambda value: str(value).rpartition(":")[2])
def test_check(request, once, transport: str, world_size: int, check: str) -> None:
    # One start of the ranks serves all checks.
    checks = tuple(name for name in values_beside(request, "check") if name not in LEFT_OUT.get(transport, ()))
    if check not in checks:
        pytest.skip("the ranks of a process group have met in a store that they no longer need; they call new_group")
    assert_passed(once(f"{transport}-{world_size}", run_ranks, run_checks, world_size, transport, checks), check)
