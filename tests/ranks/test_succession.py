"""`distopt run --heal` whose owner is lost: the other nodes go on if they are enough, and wait otherwise."""

import contextlib
import os
import signal
from collections.abc import Iterator
from itertools import product

import pytest

from benchmarks.networks.emulation import Host, near_hosts
from instruments.faults.healing import JOB, RUN, Job
from tests.processes import or_skipped, patience

PORT = 42_500
LOST = "the node that owns the job, .* has ended or cannot be reached; "
TAKEN = "the node that owned the job, .* has taken its place; healed: "


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, ...]]:
    with or_skipped(near_hosts(request.param, "s")) as made:
        yield made


@pytest.fixture
def running(start, tmp_path):
    """A context with a job of a rank on each host, once all take part; its end must be the same on all ranks."""

    @contextlib.contextmanager
    def run(hosts, *options: str, at: str = "", most: int = 0) -> Iterator[Job]:
        meet = ["--heal", "--nnodes", f"1:{most or len(hosts)}", "--rdzv-endpoint", f"{at or hosts[0].address}:{PORT}"]
        paced = ["--steps", "200", "--pause", f"{patience(0.05)}", "--until", str(tmp_path / "end")]
        words = [*RUN[:-1], "1", *meet, *options, *JOB, *paced]
        job = start(*(host.inside(words) for host in hosts))
        job.wait_for(rf"rank {len(hosts) - 1} is \d+ after \d+, one of {len(hosts)}, ")
        job.more_steps()
        yield job
        (tmp_path / "end").touch()
        assert len(set(job.end())) == 1

    return run


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("hosts", [3], indirect=True)
@pytest.mark.parametrize("how", ["killed", "frozen", "cut off"])
def test_the_others_go_on_without_the_owner_and_take_it_back(running, hosts, how):
    with running(hosts) as job:
        if how == "killed":
            job.kill_agent(0)
        elif how == "frozen":
            os.kill(job.agents[0].pid, signal.SIGSTOP)
        else:
            for host, peer in product(hosts[:1], hosts[1:]):
                host.cut(peer, silently=True)
                peer.cut(host, silently=True)
        job.wait_for(TAKEN)
        job.wait_for(f"{LOST}another node takes its place", 2)
        job.more_steps()
        if how == "killed":
            job.start_agent(0)
        elif how == "frozen":
            os.kill(job.agents[0].pid, signal.SIGCONT)
        else:
            job.wait_for("1 of the last 3 nodes can be reached .*: waiting for more than half")
            for host in hosts:
                host.mend()
        job.wait_for("has come; healed: ")
        job.wait_for(r"rank 2 is \d+ after [1-9]\d*, one of 3, resumed from [12]")


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2], indirect=True)
@pytest.mark.parametrize("alone", [False, True])
def test_one_of_two_nodes_waits_for_the_owner_unless_it_may_go_on_alone(running, hosts, alone):
    with running(hosts, *["--alone"] * alone) as job:
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
        assert alone or sum(line.startswith("step ") for line in job.lines) <= steps + 2


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_an_endpoint_of_several_hosts_the_first_of_which_is_down(running, hosts):
    at = ",".join(host.address for host in hosts[:2])
    with running(hosts[1:], at=at, most=3) as job:
        own, other = hosts[0].inside([]), hosts[1].inside([])
        job.agents.append(job._start([*own, *job.commands[0][len(other) :]]))
        job.wait_for("has come; healed: ")
        job.kill_agent(0)  # the owner, at the second host of the endpoint
        job.wait_for(TAKEN)
        job.agents.pop(0)
