"""Ranks on two hosts that are network namespaces of this machine. Needs root; is skipped elsewhere."""

import re
import sys
import time

import pytest

from tests.processes import ROOT, Program

SCRIPT = str(ROOT / "tests" / "ranks" / "hosts_script.py")


@pytest.mark.slow
def test_sum_is_that_of_the_flat_communicator_and_has_the_same_bits_everywhere(net):
    ended = Program(net.mpiexec(2, [sys.executable, SCRIPT, "check"])).end()
    assert ended.code == 0, ended.stderr
    assert "was not matched" not in ended.stdout, "UCX warns of messages that nobody has received"
    told = re.findall(r"^rank (\d) on (\S+) over (\w+): (\w+)$", ended.stdout, re.MULTILINE)
    first, second = (host.name for host in net.hosts)
    assert sorted((rank, host) for rank, host, *_ in told) == [("0", first), ("1", first), ("2", second), ("3", second)]
    assert {backend for _, _, backend, _ in told} == {"hierarchical"}
    assert len({digest for *_, digest in told}) == 1


@pytest.mark.slow
def test_killed_rank_ends_the_job_on_both_hosts(net):
    started = time.monotonic()
    assert Program(net.mpiexec(2, [sys.executable, SCRIPT, "SIGKILL"])).end().code != 0
    assert time.monotonic() - started < 60, "ended, not timed out (120 s)"
