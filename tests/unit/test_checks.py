"""The comparison of environments before the first collective."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt import comm
from distopt.comm.environment import check_same_environment, environment
from distopt.errors import LaunchError
from distopt.launch.job.base import Job
from distopt.launch.job.topology import Topology
from tests.unit.refusals import refused


class Told(Job):
    """A job whose exchange gives what a test says."""

    def __init__(self, payloads):
        self.topology = Topology(0, len(payloads), 0, 1, tuple("ab"[rank % 2] for rank in range(len(payloads))))
        self.payloads = payloads

    def all_gather(self, payload):
        return [payload if other is None else other for other in self.payloads]

    def _make_host_group(self):
        raise AssertionError


def but(**changes):
    return json.dumps(environment("mpi") | changes).encode()


def test_equal_environments_pass_and_communicators_are_made_after_the_comparison():
    assert {"distopt", "NumPy", "Python", "communicator"} <= environment("shm").keys()
    for _ in range(2):
        compare(None, but(), None)
    with pytest.raises(LaunchError, match=r"differ in communicator: mpi on rank 0 \(a\); shm on rank 1 \(b\)"):
        comm.create(Told([None, but(communicator="shm")]), "mpi")
    pytest.importorskip("mpi4py.MPI", reason="mpi4py is absent: pip install mpi4py mpich", exc_type=ImportError)
    assert environment("mpi")["MPI library"]
    assert "MPI library" not in environment("shm"), "there, MPI does not carry the data"


def compare(*payloads):
    check_same_environment(Told(payloads), environment("mpi"))


def test_ranks_that_differ_are_named_and_absurd_messages_are_refused_unread():
    for key in ("NumPy", "distopt", "communicator"):
        own, other = re.escape(environment("mpi")[key]), but(**{key: "9.9"})
        said = rf"the ranks differ in {key}: {own} on ranks 0, 2 \(a\); 9.9 on ranks 1, 3 \(b\)"
        refused(LaunchError, said, compare, None, other, None, other)
    refused(LaunchError, r"differ in .*nothing on rank 1 \(b\)", compare, None, b"{}")
    for payload in (b"[" * 60_000, b" " * 70_000 + b"{}"):
        refused(LaunchError, "rank 1 does not say", compare, None, payload)


@pytest.mark.slow
@given(st.one_of(st.binary(max_size=50), st.recursive(st.text(max_size=3) | st.integers(), st.lists).map(json.dumps)))
def test_anything_that_a_rank_may_send_is_an_error(payload):
    payload = payload if isinstance(payload, bytes) else payload.encode()
    with pytest.raises(LaunchError, match="rank 1"):
        compare(None, payload)
