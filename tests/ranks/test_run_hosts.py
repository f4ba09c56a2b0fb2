"""`distopt run` on two hosts that are network namespaces, and what can go wrong where its nodes meet."""

import os
import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.networks.far import Link, far_hosts
from tests.conformance.ranks import needs_ucx
from tests.processes import BY_VARIABLES, HERE, LAUNCHED, RUN, Program, end_all, or_skipped, patience
from tests.ranks.test_launchers import of_srun


def on_two_hosts(net, *words: str, ranks=(2, 2), options=(), env=None) -> list[Program]:
    """The same line on both hosts, in either order."""
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29400", *options, *words]
    commands = ([*RUN, "--nproc-per-node", str(n), *meet] for n in ranks)
    return [Program(host.inside(command), env) for host, command in zip(net.hosts, commands, strict=True)]


def agent_of(program: Program) -> int:
    commands = program.pids().items()
    return next(pid for pid, command in commands if " -m distopt run " in command and "sh -c" not in command)


@needs_ucx
@pytest.mark.slow
@pytest.mark.parametrize("mpi", [False, True])
def test_ranks_of_two_hosts_meet_through_ucx(net, mpi):
    """MPI, which the script may have loaded, brings a libucp of its own, beside which no other can be loaded."""
    ended = end_all(on_two_hosts(net, LAUNCHED, "ok", *["MPI"] * mpi, ranks=(2, 1)))
    said = [sorted(line for line in one.stdout.splitlines() if "UCX  WARN" not in line) for one in ended]
    first, second = (f"{host.name}: HostsJob ucx mpi={mpi}" for host in net.hosts)
    lines = [f"[rank 1] rank 1 of 3, 1 of 2 on {first}", f"rank 0 of 3, 0 of 2 on {first}"]
    assert said == [lines, [f"[rank 2] rank 2 of 3, 0 of 1 on {second}"]]


def listened(host) -> set[int]:
    """The TCP ports at which the programs of a host listen, except those of the loopback."""
    shown = Program(host.inside(["cat", "/proc/net/tcp", "/proc/net/tcp6"])).end().stdout
    rows = [line.split() for line in shown.splitlines() if " 0A " in line]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if not row[1].startswith("0100007F:")}


@needs_ucx
@pytest.mark.slow
def test_a_job_listens_in_its_range_of_ports_and_tells_if_they_are_too_few(net):
    programs = [each.ready() for each in on_two_hosts(net, LAUNCHED, "stay", env={"DISTOPT_PORTS": "24000-24009"})]
    seen = [listened(host) for host in net.hosts]
    programs[0].process.terminate()
    end_all(programs, 143)
    assert len(seen[0]) >= 4, seen  # the endpoint, the server of rank 0, two ranks
    assert len(seen[1]) >= 2, seen
    assert seen[0] | seen[1] <= {29400, *range(24000, 24010)}
    programs = on_two_hosts(net, LAUNCHED, "ok", env={"DISTOPT_PORTS": "24020-24021"})
    ended = [program.end() for program in programs]
    assert all(one.code != 0 for one in ended), ended
    assert any("all ports of DISTOPT_PORTS=24020-24021 are taken" in one.stderr for one in ended), ended


@pytest.mark.slow
def test_ranks_meet_again_after_a_restart(net):
    ended = end_all(on_two_hosts(net, LAUNCHED, "SIGKILL once", ranks=(1, 1), options=("--max-restarts", "1")))
    for one, mark, rank in zip(ended, ("", "[rank 1] "), (0, 1), strict=True):
        assert len(re.findall(rf"^{re.escape(mark)}rank {rank} of 2, 0 of 1", one.stdout, re.MULTILINE)) == 2
        assert re.search(r"was ended by SIGKILL.*starting all ranks again \(1 of 1\)$", one.agent_lines[0])


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_agent_takes_all_with_it(net, lost):
    programs = [program.ready() for program in on_two_hosts(net, BY_VARIABLES, "deaf")]
    pid = agent_of(programs[lost])
    os.kill(pid, signal.SIGKILL)
    ended = end_all(programs, [-9, 1] if lost == 0 else [1, -9])
    node = "node 1 (ranks 2 to 3)" if lost else f"the node that owns {net.hosts[0].address}:29400"
    end = f"{net.hosts[lost].name} (pid {pid}), has ended or cannot be reached; see its output"
    assert ended[1 - lost].agent_lines == [f"distopt run: {node}, {end}"]


@pytest.mark.slow
def test_a_job_survives_an_outage_of_a_second(net):
    programs = [program.ready(1) for program in on_two_hosts(net, LAUNCHED, "stay", ranks=(1, 1))]
    net.cut(silently=False)
    time.sleep(1.0)
    net.mend()
    time.sleep(patience(2.0))
    assert [program.process.poll() for program in programs] == [None, None]
    programs[0].process.terminate()
    end_all(programs, 143)


def test_a_signal_to_one_host_ends_both(net):
    programs = [program.ready() for program in on_two_hosts(net, BY_VARIABLES, "stay")]
    os.kill(agent_of(programs[1]), signal.SIGINT)
    assert [one.agent_lines for one in end_all(programs, 130)] == [["distopt run: SIGINT: all 4 ranks have ended"]] * 2


# -- where nodes meet, on one host ----------------------------------------------------------------------------------
def node(port: int, how: str, *options: str, env: dict[str, str] | None = None) -> Program:
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", *options]
    return Program([*RUN, "--nproc-per-node", "1", *meet, BY_VARIABLES, how], env)


def owner_at(port: int, how: str, *options: str, env: dict[str, str] | None = None) -> Program:
    """A node at whose endpoint somebody has hung up in silence.

    As one does that has waited too long for an answer, on a slow line: the node must not take it for a stranger.
    """
    owner = node(port, how, *options, env=env)
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)) != 0:
            time.sleep(0.02)
    return owner


TURNED_AWAY = (
    "distopt run: turned away a connection from 127.0.0.1 that is not a node of this job: it has another --rdzv-id or "
    "DISTOPT_JOB_SECRET, or is not distopt run"
)


@pytest.mark.parametrize("strange", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_garbage_and_strangers_are_turned_away_and_the_job_runs(port, strange):
    env = {"DISTOPT_JOB_SECRET": "s"}
    owner = owner_at(port, "variables", env=env)
    if strange:
        with socket.create_connection(("127.0.0.1", port)) as garbage:
            garbage.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(range(256)))
        text = rf"distopt run: the program at 127.0.0.1:{port} is no node of this .* or another port\n"
        others = end_all([node(port, "variables"), node(port, "variables", "--rdzv-id", "x")], 2)
        assert all(re.fullmatch(text, one.stderr) for one in others)
    ended = end_all([owner, node(port, "variables", env=env)])
    assert [one.agent_lines for one in ended] == [[TURNED_AWAY] * strange, []]  # once


@pytest.mark.parametrize(
    ("meet", "text"),
    [
        (  # a node that never comes
            "--rdzv-endpoint 127.0.0.1:{port} --rdzv-timeout 1",
            r"1 of 2 nodes have come: {here} \(pid \d+\); within 1 s no other has. .*",
        ),
        (  # an owner that never comes
            "--node-rank 1 --master-addr 127.0.0.1 --master-port {port} --rdzv-timeout 1",
            r"no distopt run answers at 127.0.0.1:{port} within 1 s \(Connection refused\); .*",
        ),
        ("--rdzv-endpoint nowhere.invalid", "the host of the endpoint nowhere.invalid:29400 cannot be found: .*"),
        (  # a program that listens and says nothing
            "--rdzv-endpoint localhost:{silent} --rdzv-timeout 1",
            ".* has not answered as distopt run does within 1 s; if it is another, give .*",
        ),
        (
            "--rdzv-endpoint 127.0.0.1:{port},127.0.0.2:{port} --heal",
            ".* are this one, at the same port; give each once.*",
        ),
    ],
)
def test_nodes_that_do_not_meet(port, meet, text):
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = meet.format(port=port, silent=other.getsockname()[1]).split()
        ended = Program([*RUN, "--nnodes", "2", *words, BY_VARIABLES, "stay"]).end(code=2)
    assert re.fullmatch(f"distopt run: {text.format(port=port, here=re.escape(HERE))}\n", ended.stderr)


@pytest.mark.slow  # a call without an answer takes five seconds
@pytest.mark.parametrize("options", [[], ["--heal"]])
def test_a_node_that_waits_for_an_owner_says_so(options):
    owner = "203.0.113.7:29400"  # an address of documentation
    words = [*RUN, *options, "--nnodes", "2", "--rdzv-endpoint", owner, "--rdzv-timeout", "8", BY_VARIABLES, "stay"]
    first, *_ = Program(words, {"DISTOPT_STALL_WARNING": "0.1"}).end(code=2).stderr.splitlines()
    text = rf"distopt run: waiting for the node that owns {owner}: (no answer|Network is unreach.*)"
    assert re.fullmatch(text, first)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (["--nnodes", "2"], ["--nnodes", "3"], "was started with --nnodes 3, "),
        (["--node-rank", "1"], ["--node-rank", "1"], "was started with --node-rank 1, and so was another node"),
    ],
)
def test_lines_that_contradict_each_other_end_both(port, first, second, text):
    owner = owner_at(port, "stay", *first)
    assert all(text in one.agent_lines[-1] for one in end_all([owner, node(port, "stay", *second)], 2))


def test_a_second_job_on_the_endpoint_is_refused_and_the_first_runs_on(port):
    first = [program.ready(1) for program in [node(port, "stay") for _ in range(2)]]
    ended = end_all([node(port, "stay") for _ in range(2)], 2)
    text = rf"distopt run: 127.0.0.1:{port} refuses this node: the job 'none' there has its 2 nodes already: .*\n"
    assert all(re.fullmatch(text, one.stderr) for one in ended)
    assert [program.process.poll() for program in first] == [None, None]
    first[0].process.terminate()
    end_all(first, 143)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting(port, signum):
    ended = owner_at(port, "stay").end_by(signum, 128 + signum)
    assert ended.agent_lines[-1] == f"distopt run: {signum.name}: no rank has been started"


# -- names and numbers -------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)], ids=["node 0 owns the endpoint", "node 1 owns the endpoint"])
def test_nodes_with_the_same_host_name_meet(net, numbers):
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29461", "--node-rank"]
    ended = end_all(
        Program(replace(host, name="clone").inside([*RUN, *meet, str(number), LAUNCHED, "ok"]))
        for host, number in zip(net.hosts, numbers, strict=True)
    )
    said = sorted(found for one in ended for found in re.findall(r"rank \d of 2, \d of \d on clone", one.stdout))
    assert said == ["rank 0 of 2, 0 of 1 on clone", "rank 1 of 2, 0 of 1 on clone"]


def test_nodes_meet_at_an_ipv6_address_in_brackets(port):
    command = [*RUN, "--nnodes", "2", "--rdzv-endpoint", f"[::1]:{port}", BY_VARIABLES, "variables"]
    end_all([Program(command), Program(command)])


# -- slow ways ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 1.2])
def test_a_node_far_away_joins(seconds):
    """So long is the way there and back; a meeting takes it several times."""
    with or_skipped(far_hosts(2, Link(seconds, 1e6), "-meet")) as hosts:
        meet = ["--nnodes", "2", "--rdzv-timeout", "100", "--rdzv-endpoint", f"{hosts[0].address}:29471"]
        line = [*RUN, *meet, BY_VARIABLES, "variables"]
        ended = end_all(Program(host.inside(line), {"DISTOPT_JOB_SECRET": "s"}) for host in hosts)
    assert not any("another --rdzv-id" in one.stderr for one in ended)


# -- words -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_rank_0_does_not_lose_itself():
    """Its helpers, which watch the other ranks, are killed."""
    programs = [program.ready(1) for program in of_srun("stay")]
    pid = programs[0].process.pid
    helpers = [int(x) for task in Path(f"/proc/{pid}/task").iterdir() for x in (task / "children").read_text().split()]
    for helper in helpers:
        os.kill(helper, signal.SIGKILL)
    if not helpers:
        programs[0].process.terminate()
    ended = [program.end() for program in programs]
    assert ended[0].code != 0
    assert not re.search("rank 0 .*has lost rank 0", ended[0].stderr)
