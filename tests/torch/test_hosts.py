"""The process group on two hosts, which are network namespaces: its checks, its faults, and every way to start."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks.networks.emulation import LINK, TwoHosts
from tests.parts import values_beside
from tests.processes import ROOT, Ended, Program, end_all

from .checks.__main__ import outcomes
from .test_collectives import NAMES, expect_no_error

SCRIPT = str(Path(__file__).with_name("launched.py"))
PORT = 29_400
SWEPT = [pytest.mark.slow, pytest.mark.sweep]


@pytest.mark.slow(kept=3)
@pytest.mark.parametrize("ranks", ["2+1", *(pytest.param(ranks, marks=SWEPT) for ranks in ("1+1", "2+2"))])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("net")
def test_check(request, once, name: str, ranks: str) -> None:
    expect_no_error(once(f"torch-{ranks}", outcomes, ranks, values_beside(request, "name")), name, ranks)


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 5, 6, 12])
@pytest.mark.usefixtures("net")
def test_failures_are_named(first: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "instruments.torch.faults", "1", "--first", str(first), "--hosts"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def run_on_both(net: TwoHosts, words: str, known: Path | None) -> list[Ended]:
    """`words`, with the number of ranks in place of {ranks} and so on, typed on both hosts, whose names `known` has."""
    programs = []
    named = ["unshare", "--mount", "sh", "-c", f'mount --bind {known} /etc/hosts && exec "$@"', "sh"] if known else []
    for node, (host, ranks) in enumerate(zip(net.hosts, (2, 1), strict=True)):
        line = words.format(ranks=ranks, node=node, own=host.address, first=net.hosts[0].address, port=PORT)
        command = [*named, sys.executable, "-W", "ignore", "-m", *line.split(), SCRIPT, "env://"]
        programs.append(Program(host.inside(command), {"OMP_NUM_THREADS": "1"}))
    return end_all(programs)


TORCHRUN = "torch.distributed.run --nnodes 2 --nproc-per-node {ranks} --local-addr {own}"
WAYS = {
    "distopt run": "distopt run --nnodes 2 --nproc-per-node {ranks} --rdzv-endpoint {first}:{port}",
    "torchrun c10d": f"{TORCHRUN} --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint {{first}}:{{port}}",
    "torchrun static": f"{TORCHRUN} --node-rank {{node}} --master-addr {{first}} --master-port {{port}}",
}


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("way", WAYS)
def test_a_line_typed_on_both_hosts_starts_all_ranks(net: TwoHosts, way: str, tmp_path: Path) -> None:
    known = tmp_path / "hosts"
    known.write_text("".join(f"{host.address} {host.name}\n" for host in net.hosts))
    ended = run_on_both(net, WAYS[way], known if "c10d" in way else None)  # torchrun asks for its own name there
    assert sorted(lines_of(ended)) == [f"rank {rank} of 3 is done" for rank in range(3)], ended


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("interface", ["", LINK])
def test_ranks_started_by_hand(net: TwoHosts, interface: str) -> None:
    """As in PyTorch's tutorials, by address, rank and number of ranks. The name of a host has no address here."""
    method = f"tcp://{net.hosts[0].address}:{PORT}"
    programs = []
    for rank, host in enumerate((net.hosts[0], *net.hosts)):
        variables = {"RANK": str(rank), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
        variables |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        programs.append(Program(host.inside([sys.executable, "-W", "ignore", SCRIPT, method]), variables))
    ended = end_all(programs)
    assert lines_of(ended) == [f"rank {rank} of 3 is done" for rank in range(3)], ended


@pytest.mark.slow
def test_ranks_of_mpiexec(net: TwoHosts) -> None:
    method = f"tcp://{net.hosts[0].address}:{PORT}"
    ended = end_all([Program(net.mpiexec(2, [sys.executable, "-W", "ignore", SCRIPT, method]))])
    assert sorted(lines_of(ended)) == [f"rank {rank} of 4 is done" for rank in range(4)], ended


def lines_of(ended: list[Ended]) -> list[str]:
    """The ranks' lines, without the marks of `distopt run` and mpiexec."""
    return [line[line.index("rank", line.find("] ") + 1) :] for one in ended for line in one.stdout.splitlines()]
