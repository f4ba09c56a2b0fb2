"""`distopt run` on two hosts that are network namespaces, and what can go wrong where its nodes meet."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.conformance.ranks import needs_ucx
from tests.processes import ROOT, Ended, Program, patience

RUN = [sys.executable, "-m", "distopt", "run", "--nproc-per-node"]
SCRIPT = str(ROOT / "tests" / "ranks" / "run_script.py")
LAUNCHED = str(ROOT / "tests" / "ranks" / "launched_script.py")
HERE = os.uname().nodename


def on_two_hosts(
    net,
    *words: str,
    ranks: tuple[int, int] = (2, 2),
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> list[Program]:
    """The same line on both hosts, in either order."""
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29400", *options]
    return [Program(host.inside([*RUN, str(n), *meet, *words]), env) for host, n in zip(net.hosts, ranks, strict=True)]


def ends(programs: list[Program]) -> list[Ended]:
    return [program.end() for program in programs]


def told(ended: Ended) -> list[str]:
    """Without the notice that the other node is slow to come."""
    words = re.compile("distopt run: (?!waiting for the other nodes)")
    return [line for line in ended.stderr.splitlines() if words.match(line)]


def agent_of(program: Program) -> int:
    return next(
        pid for pid, command in program.pids().items() if " -m distopt run " in command and "sh -c" not in command
    )


@needs_ucx
@pytest.mark.slow
def test_ranks_of_two_hosts_meet_through_ucx(net):
    ended = ends(on_two_hosts(net, LAUNCHED, "ok", ranks=(2, 1)))
    assert [one.code for one in ended] == [0, 0], ended
    first, second = net.hosts
    assert sorted(ended[0].stdout.splitlines()) == [
        f"[rank 1] rank 1 of 3, 1 of 2 on {first.name}: HostsJob ucx mpi=False",
        f"rank 0 of 3, 0 of 2 on {first.name}: HostsJob ucx mpi=False",
    ]
    assert ended[1].stdout == f"[rank 2] rank 2 of 3, 0 of 1 on {second.name}: HostsJob ucx mpi=False\n"


def listened(host) -> set[int]:
    """The TCP ports at which the programs of a host listen, except those of the loopback."""
    shown = subprocess.run(
        host.inside(["cat", "/proc/net/tcp", "/proc/net/tcp6"]), capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in shown.stdout.splitlines() if " 0A " in line]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if not row[1].startswith("0100007F:")}


@needs_ucx
@pytest.mark.slow
def test_a_job_listens_in_its_range_of_ports(net):
    programs = on_two_hosts(net, LAUNCHED, "stay", env={"DISTOPT_PORTS": "24000-24009"})
    for program in programs:
        program.read_lines(2)
    seen = [listened(host) for host in net.hosts]
    programs[0].process.terminate()
    assert [one.code for one in ends(programs)] == [143, 143]
    assert len(seen[0]) >= 4, seen  # the endpoint, the server of rank 0, two ranks
    assert len(seen[1]) >= 2, seen
    assert seen[0] | seen[1] <= {29400, *range(24000, 24010)}


@needs_ucx
@pytest.mark.slow
def test_a_range_of_too_few_ports_is_told(net):
    ended = ends(on_two_hosts(net, LAUNCHED, "ok", env={"DISTOPT_PORTS": "24020-24021"}))
    assert all(one.code != 0 for one in ended), ended
    assert any("all ports of DISTOPT_PORTS=24020-24021 are taken" in one.stderr for one in ended), ended


@pytest.mark.slow
def test_ranks_meet_again_after_a_restart(net):
    ended = ends(on_two_hosts(net, LAUNCHED, "SIGKILL once", ranks=(1, 1), options=("--max-restarts", "1")))
    assert [one.code for one in ended] == [0, 0], ended
    for one, mark, rank in zip(ended, ("", "[rank 1] "), (0, 1), strict=True):
        assert len(re.findall(rf"^{re.escape(mark)}rank {rank} of 2, 0 of 1", one.stdout, re.MULTILINE)) == 2
        assert "was ended by SIGKILL" in told(one)[0]
        assert told(one)[0].endswith("starting all ranks again (1 of 1)")


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_agent_takes_all_with_it(net, lost):
    programs = on_two_hosts(net, SCRIPT, "deaf")
    for program in programs:
        program.read_lines(2)
    pid = agent_of(programs[lost])
    os.kill(pid, signal.SIGKILL)
    ended = ends(programs)
    assert [one.code for one in ended] == ([-9, 1] if lost == 0 else [1, -9])
    name = f"{net.hosts[lost].name} (pid {pid}), has ended or cannot be reached; see its output"
    expected = (
        f"the node that owns {net.hosts[0].address}:29400, {name}" if lost == 0 else f"node 1 (ranks 2 to 3), {name}"
    )
    assert told(ended[1 - lost]) == [f"distopt run: {expected}"]


@pytest.mark.slow
def test_a_job_survives_an_outage_of_a_second(net):
    programs = on_two_hosts(net, LAUNCHED, "stay", ranks=(1, 1))
    for program in programs:
        program.read_lines(1)
    net.cut(silently=False)
    time.sleep(1.0)
    net.mend()
    time.sleep(patience(2.0))
    assert [program.process.poll() for program in programs] == [None, None]
    programs[0].process.terminate()
    assert [one.code for one in ends(programs)] == [143, 143]


def test_a_signal_to_one_host_ends_both(net):
    programs = on_two_hosts(net, SCRIPT, "stay")
    for program in programs:
        program.read_lines(2)
    os.kill(agent_of(programs[1]), signal.SIGINT)
    ended = ends(programs)
    assert [(one.code, told(one)) for one in ended] == [(130, ["distopt run: SIGINT: all 4 ranks have ended"])] * 2


# -- where nodes meet, on one host ----------------------------------------------------------------------------------
def node(port: int, *words: str, nodes: int = 2, env: dict[str, str] | None = None) -> Program:
    endpoint = f"127.0.0.1:{port}"
    return Program([*RUN, "1", "--nnodes", str(nodes), "--rdzv-endpoint", endpoint, *words], env)


def wait_for(port: int) -> None:
    """Wait until it has a listener."""
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)) != 0:
            time.sleep(0.02)


TURNED_AWAY = (
    "distopt run: turned away a connection from 127.0.0.1 that is not a node of this job: it has another --rdzv-id or "
    "DISTOPT_JOB_SECRET, or is not distopt run"
)


@pytest.mark.slow
def test_garbage_and_strangers_are_turned_away_and_the_job_runs(port):
    owner = node(port, SCRIPT, "variables", env={"DISTOPT_JOB_SECRET": "s"})
    wait_for(port)
    with socket.create_connection(("127.0.0.1", port)) as garbage:
        garbage.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(range(256)))
    strangers = [node(port, SCRIPT, "variables"), node(port, "--rdzv-id", "x", SCRIPT, "variables")]
    for ended in ends(strangers):
        assert ended.code == 2
        assert re.fullmatch(
            rf"distopt run: the program at 127.0.0.1:{port} is no node of this .* or another port\n", ended.stderr
        )
    ended = ends([owner, node(port, SCRIPT, "variables", env={"DISTOPT_JOB_SECRET": "s"})])
    assert [one.code for one in ended] == [0, 0], ended
    assert told(ended[0]) == [TURNED_AWAY]  # once


def test_who_hangs_up_in_silence_is_no_stranger(port):
    """As a node that has waited too long for an answer, on a slow line."""
    owner = node(port, SCRIPT, "variables")
    wait_for(port)
    ended = ends([owner, node(port, SCRIPT, "variables")])
    assert [(one.code, told(one)) for one in ended] == [(0, [])] * 2


def test_a_node_that_never_comes_is_waited_for_in_vain(port):
    ended = node(port, "--rdzv-timeout", "1", SCRIPT, "stay").end()
    assert ended.code == 2
    assert re.fullmatch(
        rf"distopt run: 1 of 2 nodes have come: {re.escape(HERE)} \(pid \d+\); within 1 s no other has. .*\n",
        ended.stderr,
    )


def test_an_owner_that_never_comes_is_waited_for_in_vain(port):
    static = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    ended = Program([*RUN, "1", *static, "--rdzv-timeout", "1", SCRIPT, "stay"]).end()
    assert ended.code == 2
    assert re.fullmatch(
        rf"distopt run: no distopt run answers at 127.0.0.1:{port} within 1 s \(Connection refused\); .*\n",
        ended.stderr,
    )


def test_an_unknown_host_is_told_at_once():
    ended = Program([*RUN, "1", "--nnodes", "2", "--rdzv-endpoint", "nowhere.invalid", SCRIPT, "stay"]).end()
    assert ended.code == 2
    assert re.fullmatch(
        r"distopt run: the host of the endpoint nowhere.invalid:29400 cannot be found: .*\n", ended.stderr
    )


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (["--nnodes", "2"], ["--nnodes", "3"], "was started with --nnodes 3, "),
        (["--node-rank", "1"], ["--node-rank", "1"], "was started with --node-rank 1, and so was another node"),
    ],
)
def test_lines_that_contradict_each_other_end_both(port, first, second, text):
    owner = node(port, *first, SCRIPT, "stay")
    wait_for(port)
    ended = ends([owner, node(port, *second, SCRIPT, "stay")])
    assert [one.code for one in ended] == [2, 2]
    assert all(text in told(one)[-1] for one in ended)


def test_a_second_job_on_the_endpoint_is_refused_and_the_first_runs_on(port):
    first = [node(port, SCRIPT, "stay") for _ in range(2)]
    for program in first:
        program.read_lines(1)
    ended = ends([node(port, SCRIPT, "stay"), node(port, SCRIPT, "stay")])
    assert [one.code for one in ended] == [2, 2]
    text = rf"distopt run: 127.0.0.1:{port} refuses this node: the job 'none' there has its 2 nodes already: .*\n"
    assert all(re.fullmatch(text, one.stderr) for one in ended)
    assert [program.process.poll() for program in first] == [None, None]
    first[0].process.terminate()
    assert [one.code for one in ends(first)] == [143, 143]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting(port, signum):
    program = node(port, SCRIPT, "stay")
    wait_for(port)
    program.process.send_signal(signum)
    ended = program.end()
    assert (ended.code, told(ended)[-1]) == (128 + signum, f"distopt run: {signum.name}: no rank has been started")


@needs_ucx
@pytest.mark.slow
def test_a_script_that_has_loaded_mpi_joins_over_ucx(net):
    """MPICH's wheel brings a libucp of its own, beside which no other can be loaded."""
    script = str(ROOT / "tests" / "ranks" / "mpi_imported_script.py")
    ended = ends(on_two_hosts(net, script, "ok", ranks=(1, 1), env={"PYTHONPATH": str(ROOT)}))
    assert [one.code for one in ended] == [0, 0], ended
    assert all("HostsJob ucx mpi=True" in one.stdout for one in ended), ended
