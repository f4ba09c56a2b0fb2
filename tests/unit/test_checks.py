"""The comparison of environments before the first collective."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt import comm
from distopt.comm.environment import check_same_environment, environment
from distopt.errors import LaunchError
from distopt.launch.job.base import Job
from distopt.launch.job.topology import Topology


class Told(Job):
    """A job whose exchange gives what a test says."""

    def __init__(self, payloads):
        hosts = tuple("ab"[rank % 2] for rank in range(len(payloads)))
        self.topology = Topology(0, len(payloads), 0, 1, hosts)
        self.payloads = payloads

    def all_gather(self, payload):
        return [payload if other is None else other for other in self.payloads]

    def _make_host_group(self):
        raise AssertionError


def but(**changes):
    return json.dumps(environment("mpi") | changes).encode()


def test_equal_environments_pass():
    assert {"distopt", "NumPy", "Python", "communicator"} <= environment("shm").keys()
    for _ in range(2):
        check_same_environment(Told([None, but(), None]), environment("mpi"))


def test_the_mpi_library_is_compared_where_mpi_carries_the_data():
    pytest.importorskip("mpi4py.MPI", reason="mpi4py is absent: pip install mpi4py mpich", exc_type=ImportError)
    assert environment("mpi")["MPI library"]
    assert "MPI library" not in environment("shm")


@pytest.mark.parametrize("key", ["NumPy", "distopt", "communicator"])
def test_ranks_that_differ_are_named(key):
    with pytest.raises(LaunchError) as caught:
        check_same_environment(Told([None, but(**{key: "9.9"}), None, but(**{key: "9.9"})]), environment("mpi"))
    assert f"the ranks differ in {key}: {environment('mpi')[key]} on ranks 0, 2 (a); 9.9 on ranks 1, 3 (b)" in str(
        caught.value
    )


def test_what_a_rank_does_not_say_differs():
    with pytest.raises(LaunchError, match=r"differ in .*nothing on rank 1 \(b\)"):
        check_same_environment(Told([None, b"{}"]), environment("mpi"))


@pytest.mark.slow
@given(st.one_of(st.binary(max_size=50), st.recursive(st.text(max_size=3) | st.integers(), st.lists).map(json.dumps)))
def test_anything_that_a_rank_may_send_is_an_error(payload):
    payload = payload if isinstance(payload, bytes) else payload.encode()
    with pytest.raises(LaunchError, match="rank 1"):
        check_same_environment(Told([None, payload]), environment("mpi"))


def test_absurd_messages_are_refused_unread():
    for payload in (b"[" * 60_000, b" " * 70_000 + b"{}"):
        with pytest.raises(LaunchError, match="rank 1 does not say"):
            check_same_environment(Told([None, payload]), environment("mpi"))


def test_communicators_are_made_after_the_comparison():
    with pytest.raises(LaunchError, match=r"differ in communicator: mpi on rank 0 \(a\); shm on rank 1 \(b\)"):
        comm.create(Told([None, but(communicator="shm")]), "mpi")
