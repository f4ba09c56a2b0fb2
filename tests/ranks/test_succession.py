"""`distopt run --heal` whose owner is lost: the other nodes go on if they are enough, and wait otherwise."""

import os
import signal
from collections.abc import Iterator

import pytest

from benchmarks.networks.emulation import Host, HostsUnavailableError, near_hosts
from tests.faults.healing import JOB, RUN, Job
from tests.processes import patience

PORT = 42_500
LOST = "the node that owns the job, .* has ended or cannot be reached; "
TAKEN = "the node that owned the job, .* has taken its place; healed: "


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, ...]]:
    try:
        with near_hosts(request.param, "s") as made:
            yield made
    except HostsUnavailableError as reason:
        pytest.skip(str(reason))


def run(start, hosts, end, *options: str, at: str = "", most: int = 0) -> Job:
    """A job of a rank on each host, once all take part."""
    at = at or hosts[0].address
    meet = ["--heal", "--nnodes", f"1:{most or len(hosts)}", "--rdzv-endpoint", f"{at}:{PORT}"]
    paced = ["--steps", "200", "--pause", f"{patience(0.05)}", "--until", str(end)]
    words = [*RUN[:-1], "1", *meet, *options, *JOB, *paced]
    job = start(*(host.inside(words) for host in hosts))
    job.wait_for(rf"rank {len(hosts) - 1} is \d+ after \d+, one of {len(hosts)}, ")
    job.more_steps()
    return job


def cut(hosts, first) -> None:
    """Nothing gets from the first hosts to the others, nor back."""
    for host in hosts:
        for peer in hosts:
            if (host in first) != (peer in first):
                host.cut(peer, silently=True)


def mend(hosts) -> None:
    for host in hosts:
        host.mend()


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("hosts", [3], indirect=True)
@pytest.mark.parametrize("how", ["killed", "frozen", "cut off"])
def test_the_others_go_on_without_the_owner_and_take_it_back(start, hosts, tmp_path, how):
    job = run(start, hosts, tmp_path / "end")
    if how == "killed":
        job.kill_agent(0)
    elif how == "frozen":
        os.kill(job.agents[0].pid, signal.SIGSTOP)
    else:
        cut(hosts, hosts[:1])
    job.wait_for(TAKEN)
    job.wait_for(f"{LOST}another node takes its place", 2)
    job.more_steps()
    if how == "killed":
        job.start_agent(0)
    elif how == "frozen":
        os.kill(job.agents[0].pid, signal.SIGCONT)
    else:
        job.wait_for("1 of the last 3 nodes can be reached .*: waiting for more than half")
        mend(hosts)
    job.wait_for("has come; healed: ")
    job.wait_for(r"rank 2 is \d+ after [1-9]\d*, one of 3, resumed from [12]")
    (tmp_path / "end").touch()
    assert len(set(job.end())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2], indirect=True)
@pytest.mark.parametrize("alone", [False, True])
def test_one_of_two_nodes_waits_for_the_owner_unless_it_may_go_on_alone(start, hosts, tmp_path, alone):
    job = run(start, hosts, tmp_path / "end", *["--alone"] * alone)
    job.kill_agent(0)
    if alone:
        job.wait_for(TAKEN)
        job.more_steps()
    else:
        job.wait_for(f"{LOST}waiting for it")
        job.wait_for("1 of the last 2 nodes can be reached .*: waiting for more than half, or half with the owner")
        steps = sum(line.startswith("step ") for line in job.lines)
    job.start_agent(0)
    job.wait_for("; healed: ", 2 if alone else 1)
    if not alone:
        assert sum(line.startswith("step ") for line in job.lines) <= steps + 2
    (tmp_path / "end").touch()
    assert len(set(job.end())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_half_of_the_nodes_without_the_owner_wait(start, hosts, tmp_path):
    job = run(start, hosts, tmp_path / "end")
    job.kill_agent(3)
    job.kill_agent(0)
    job.wait_for("2 of the last 4 nodes can be reached .*: waiting for more than half")
    job.start_agent(3)
    job.wait_for("; healed: ")
    job.wait_for(r"rank 2 is \d+ after \d+, one of 3")
    (tmp_path / "end").touch()
    job.agents.pop(0)
    assert len(set(job.end())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_an_endpoint_of_several_hosts_the_first_of_which_is_down(start, hosts, tmp_path):
    at = ",".join(host.address for host in hosts[:2])
    job = run(start, hosts[1:], tmp_path / "end", at=at, most=3)
    own, other = hosts[0].inside([]), hosts[1].inside([])
    job.agents.append(job._start([*own, *job.commands[0][len(other) :]]))
    job.wait_for("has come; healed: ")
    job.kill_agent(0)  # the owner, at the second host of the endpoint
    job.wait_for(TAKEN)
    (tmp_path / "end").touch()
    job.agents.pop(0)
    assert len(set(job.end())) == 1
