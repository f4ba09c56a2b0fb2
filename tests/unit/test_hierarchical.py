"""Ranks of this host that believe to be on several."""

import re
import sys

import pytest

from tests.processes import ROOT, Program, is_open_mpi, mpiexec, patience

SCRIPT = str(ROOT / "tests" / "ranks" / "hosts_script.py")

# Everything that is not inherited from the flat communicator, and one of each that is.
CHECKS = (
    "^(all_reduce-(float32-mean|float16-mean|bfloat16-sum|int64-max)|reduce_scatter-float32-sum|broadcast-float64|"
    "all_gather_ragged-float32|[^-]*)$"
)
FEW = "^(all_reduce-(float32-mean|bfloat16-sum)|reduce_scatter-float32-sum|all_gather_ragged-float32|subgroups|shapes)$"


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize(
    ("transport", "order", "hosts", "checks"),
    [
        ("hierarchical", "auto", "blocks", FEW),
        ("tests.conformance.small_parts:SmallPartsCommunicator", "auto", "blocks", FEW),
        *(
            (transport, order, hosts, CHECKS)
            for transport, order in (("hierarchical", "auto"), ("hierarchical", "rank"), ("mpi", "auto"))
            for hosts in ("blocks", "round_robin")
        ),
    ],
)
def test_conformance(transport, order, hosts, checks):
    words = ("--transport", transport, "--job", f"tests.conformance.fake_hosts:{hosts}", "-k", checks)
    ended = mpiexec(4, "-m", "tests.conformance.run", *words, env={"DISTOPT_SUM_ORDER": order})
    assert ended.code == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(" checks passed") == 4


def told(stdout: str) -> list[tuple[str, str]]:
    """Every rank's line: the transport, and the rest."""
    return re.findall(r"^rank \d on \S+ over (\w+): (.*)$", stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "transport"), [("aabb", "hierarchical"), ("abba", "hierarchical"), ("aab", "mpi"), ("abc", "mpi")]
)
def test_transport_suits_the_hosts_and_has_the_same_bits_everywhere(hosts, transport):
    ended = mpiexec(len(hosts), SCRIPT, "check", hosts)
    assert ended.code == 0, ended.stderr
    assert "leaked" not in ended.stderr, "nanobind says so of objects that outlive the interpreter"
    ranks = told(ended.stdout)
    assert [name for name, _ in ranks] == [transport] * len(hosts)
    assert len({digest for _, digest in ranks}) == 1
    assert ("the hosts have 1 or 2 ranks: all communication goes through MPI" in ended.stderr) == (hosts == "aab")


def test_hosts_with_different_numbers_of_ranks_are_refused():
    ended = mpiexec(3, SCRIPT, "check", "aab", env={"DISTOPT_TRANSPORT": "hierarchical"})
    assert ended.code == 2
    assert "needs as many ranks on every host, not 2 on host-a, 1 on host-b; choose mpi" in ended.stderr


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("hosts", "transport"), [("abab", "hierarchical"), ("aabb", "mpi")])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mismatch", r"MismatchError rank \d \(host host-[ab], .* in all_reduce #\d+ of 100,000 float32"),
        (
            "op",  # on the other host, a rank may only see that those which have found the mismatch do not answer
            (
                r"MismatchError rank \d \(host host-[ab], .* all_reduce #\d+\b.*, rank \d .* all_reduce #\d+\b"
                r"|StalledError no answer within [\d.]+ s: rank \d \(host host-[ab], .* in all_reduce #\d+ of 2,000,000"
            ),
        ),
        (
            "close",
            (
                r"CommunicatorClosedError rank \d \(host host-[ab], .* but rank 3 \(host host-b, .*"
                r" has closed the communicator"
            ),
        ),
        (
            "late",
            (
                r"StalledError no answer within TIMEOUT s: rank \d \(host host-[ab], .* for rank 3 \(host host-b, .*"
                r" raise DISTOPT_TIMEOUT"
            ),
        ),
    ],
)
def test_failures_name_ranks_and_hosts(how, expected, hosts, transport):
    timeout = f"{patience(1.5) if how in {'op', 'late'} else 120:.0f}"
    ended = mpiexec(4, SCRIPT, how, hosts, env={"DISTOPT_TIMEOUT": timeout, "DISTOPT_TRANSPORT": transport})
    assert ended.code == 0, ended.stderr
    ranks = told(ended.stdout)
    assert [name for name, _ in ranks] == [transport] * 4
    for _, text in ranks:
        assert not text or re.search(expected.replace("TIMEOUT s:", f"{timeout} s:"), text), text
    assert sum(bool(text) for _, text in ranks) >= 3
    if how in {"mismatch", "op"}:
        assert sum(text.startswith("MismatchError") for _, text in ranks) >= 2


def test_ranks_that_sum_in_different_orders_are_refused():
    rank = "OMPI_COMM_WORLD_RANK" if is_open_mpi() else "PMI_RANK"
    order = f"os.environ['DISTOPT_SUM_ORDER'] = ('auto', 'rank')[int(os.environ['{rank}'])]"
    ended = mpiexec(2, "-c", f"import os; {order}; import distopt; distopt.init()")
    assert ended.code != 0
    assert "the ranks differ in DISTOPT_SUM_ORDER: auto on rank 0" in ended.stderr
    assert "rank on rank 1" in ended.stderr


# -- two hosts ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_sum_is_that_of_the_flat_communicator_and_has_the_same_bits_everywhere(net):
    ended = Program(net.mpiexec(2, [sys.executable, SCRIPT, "check"])).end()
    assert ended.code == 0, ended.stderr
    assert "was not matched" not in ended.stdout, "UCX warns of messages that nobody has received"
    told = re.findall(r"^rank (\d) on (\S+) over (\w+): (\w+)$", ended.stdout, re.MULTILINE)
    first, second = (host.name for host in net.hosts)
    assert sorted((rank, host) for rank, host, *_ in told) == [("0", first), ("1", first), ("2", second), ("3", second)]
    assert {transport for _, _, transport, _ in told} == {"hierarchical"}
    assert len({digest for *_, digest in told}) == 1
