"""`distopt run --heal`: each healing states what it has cost, the numbers are true, and the bits undisturbed ones."""

import contextlib
import os
import random
import re
import signal
from pathlib import Path

import pytest

from benchmarks.networks.emulation import HostsUnavailableError, near_hosts
from tests.processes import free_port, patience

from .healing import JOB, RUN, Job, commands, disturb, signal_all

COST = (
    r"; healed: step (\d+) was done after [\d.]+ s "
    r"\(step (\d+) had been reached, training goes on from step (\d+): (\d+) steps? lost\)"
)


def listens(port: int) -> bool:
    """Whether a process listens there; the kernel's table, since a connection would be one of a stranger."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def run_to(job: Job, step: int) -> None:
    while not any(re.fullmatch(r"step \d+", line) and int(line[5:]) >= step for line in list(job.lines)):
        job.more_steps()


def lost_steps(job: Job, count: int) -> int:
    """The steps lost, as the last of `count` healings states them; all that it states is compared with rank 0's words.

    A step may have been done and not printed.
    """
    first, reached, start, lost = map(int, job.wait_for(COST, count)[-1].groups())
    lines = list(job.lines)
    [*_, (at, resumed)] = [(i, m) for i, m in enumerate(re.match(r"rank 0 is \d+ after (\d+)", x) for x in lines) if m]
    printed = [int(line[5:]) for line in lines[:at] if re.fullmatch(r"step \d+", line)]
    assert start == int(resumed[1])
    assert first == start + 1
    assert printed[-1] <= reached <= printed[-1] + 1
    assert lost == reached - start
    return lost


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("shards", [True, False])
def test_the_steps_that_a_lost_rank_and_a_lost_node_cost(tmp_path, shards):
    """At most one, where records of own states take less than one percent of the time: a step takes long enough."""
    end = tmp_path / "end"
    script = [
        *JOB,
        "--steps",
        "200",
        "--pause",
        f"{patience(0.2)}",
        "--until",
        str(end),
        *([] if shards else ["--no-shards"]),
    ]
    port = free_port()
    run = [*RUN, "--heal", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}", *script]
    with contextlib.ExitStack() as stack:
        job = Job(run, run, after=lambda: listens(port))  # so that the first one owns the endpoint
        stack.callback(job.kill)
        job.wait_for(r"rank 3 is \d+ after \d+, one of 4, ")
        job.fork_server()
        job.more_steps()
        count = sum("; healed: " in line for line in job.lines)  # one agent may have been first by seconds
        run_to(job, 10)
        os.kill(job.pid_of(1), signal.SIGKILL)
        most = 0 if shards else 1
        assert lost_steps(job, count + 1) <= most
        run_to(job, 45)
        signal_all(job, 1, signal.SIGKILL)
        job.kill_agent(1)
        assert lost_steps(job, count + 2) <= most
        job.start_agent(1)
        assert lost_steps(job, count + 3) <= most
        end.touch()
        job.end()


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize(
    "script", [JOB, [*JOB, "--no-shards"], ["-m", "tests.torch.elastic", "ddp"], ["-m", "tests.torch.elastic", "plain"]]
)
def test_a_fault_in_the_first_step_of_an_epoch_costs_none(script: list[str]) -> None:
    """The script has ended the epoch before, which is one of 12 steps."""
    words = [*RUN, "--heal", *script, "--steps", "20"]
    want = Job([*(word for word in words if word != "--heal"), "--pause", "0"]).end()
    job = Job([*words, "--pause", f"{patience(0.1)}", "--killed-at", "12"])
    try:
        assert lost_steps(job, 1) == 0
        assert job.end() == want
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_an_agent_that_is_lost_before_its_rank_costs_one_step_at_most(tmp_path: Path, count: int) -> None:
    """Its rank takes part in more steps, and its own states no longer leave the node."""
    end = tmp_path / "end"
    port = free_port()
    run = [*RUN[:-1], "1", "--heal", "--nnodes", f"1:{count}", "--rdzv-endpoint", f"127.0.0.1:{port}", *JOB]
    run += ["--no-shards", "--steps", "200", "--pause", f"{patience(0.05)}", "--until", str(end)]
    job = Job(*[run] * count, after=lambda: listens(port))
    try:
        job.wait_for(rf"rank {count - 1} is \d+ after \d+, one of {count}, ")
        healed = sum("; healed: " in line for line in job.lines)
        job.more_steps()
        job.agents[-1].send_signal(signal.SIGSTOP)
        assert lost_steps(job, healed + 1) <= 1
        job.kill_agent(count - 1)
        end.touch()
        job.agents.pop()
        job.end()
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize(("kind", "backend"), [("node", "distopt"), ("frozen", "gloo"), ("cut", "distopt")])
def test_ddp_ends_with_the_bits_of_an_undisturbed_job(tmp_path: Path, kind: str, backend: str) -> None:
    """A node is lost for a while, at most one step with it."""
    pytest.importorskip("torch")
    end = tmp_path / "end"
    script = ["-m", "tests.torch.elastic", "plain", "--backend", backend, "--steps", "40", "--until", str(end)]
    want = Job([*RUN, *script, "--pause", "0"]).end()
    try:
        with near_hosts(2, "bits") as hosts:
            job = Job(*commands(hosts, [*script, "--pause", f"{patience(0.1)}"], n_ranks=1))
            try:
                run_to(job, 3)  # before records may have been found to take too long
                disturb(job, hosts, kind, random.Random(1))
                assert lost_steps(job, 1) <= 1
                end.touch()
                assert job.end() == want
            finally:
                job.kill()
    except HostsUnavailableError as reason:
        pytest.skip(str(reason))
