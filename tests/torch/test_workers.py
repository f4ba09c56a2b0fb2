"""`distopt run --workers`: workers of one machine that are killed, frozen, late, and refused."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from instruments.faults.healing import Job, children_of
from tests.digits import write_digits
from tests.processes import LIMIT_SECONDS, ROOT, on_a_terminal
from tests.terminal import Terminal

pytest.importorskip("torch")

SCRIPT = str(ROOT / "examples" / "pytorch" / "mnist_workers.py")
RUN = [sys.executable, "-W", "ignore", "-m", "distopt", "run"]
THREE = "--workers rank --nproc-per-node 3"
STEP = r"worker {} \(pid (\d+)\): step (\d+),"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), 512, 100)


def command(digits: Path, launch: str, options: str, sync_every: int = 5) -> list[str]:
    """Workers that heal, with these options of the launcher and of the script."""
    data = ["--data", str(digits), "--batch-size", "4", "--sync-every", str(sync_every)]
    return [*RUN, "--heal", *launch.split(), SCRIPT, *data, *options.split()]


def listens_at(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def steps_of(job: Job, worker: int) -> list[int]:
    return [int(found[2]) for line in list(job.lines) if (found := re.search(STEP.format(worker), line))]


def rank_of(agent: int, killed: list[int]) -> int:
    """Wait for the one of a worker which is none of those that were killed."""
    end = time.monotonic() + LIMIT_SECONDS
    while not (ranks := children_of(agent, without=killed)):
        assert time.monotonic() < end
        time.sleep(0.01)
    return ranks[0]


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in tree_of(int(child)))]


def signal_each(pids: list[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def ends_of(job: Job) -> set[str]:
    """The digests of all workers at the end."""
    assert [agent.wait(LIMIT_SECONDS) for agent in job.agents] == [0], job.lines
    ends = [line.partition("digest ")[2] for line in job.lines if "ends with" in line]
    assert ends, job.lines
    return set(ends)


def facts_of(job: Job, key: str) -> list[dict[str, Any]]:
    """The lines of --watch=json that have this key."""
    rows = [json.loads(line) for line in list(job.lines) if line.startswith('{"time": ')]
    return [row for row in rows if key in row]


def wait_for_facts(job: Job, **wanted: object) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not any(facts.items() >= wanted.items() for facts in facts_of(job, next(iter(wanted)))[-8:]):
        assert time.monotonic() < end, job.lines
        time.sleep(0.05)


@pytest.mark.slow(kept=1, rest=1)
@pytest.mark.parametrize(("count", "killed"), [(2, 1), (4, 2), (3, 2)])
def test_killed_workers_stop_no_other_and_join_again(start, count: int, killed: int, digits: Path) -> None:
    """One; two at once; all but one. --watch shows members and losses."""
    launch = f"--watch=json --workers rank --nproc-per-node {count}"
    job = start(command(digits, launch, "--averages 60 --pause 0.06"))
    stay, lost, joined = [*range(count - killed)], [*range(count - killed, count)], [*range(count, count + killed)]
    pids = [int(job.wait_for(STEP.format(worker))[-1][1]) for worker in range(count)]
    wait_for_facts(job, members=[*stay, *lost], lost=[])
    for worker, pid in enumerate(pids):
        wait_for_facts(job, worker=worker, rank=0, pid=pid, state="running")
    for worker in lost:
        os.kill(pids[worker], signal.SIGKILL)
    for worker in lost:
        job.wait_for(f"worker {worker}, .* has ended or cannot be reached; . workers? goe?s? on")
    first = dict.fromkeys(stay, 5)
    for worker in joined:
        job.wait_for(rf"worker {worker}, .* has joined with average \d+")
        first[worker] = int(job.wait_for(STEP.format(worker))[0][2])
    wait_for_facts(job, members=[*stay, *joined], lost=lost)
    job.wait_for("ends with", count)
    assert len(ends_of(job)) == 1
    for worker, step in first.items():
        assert steps_of(job, worker) == [*range(step, 301, 5)]  # not one repeated, none left out
    last = facts_of(job, "worker")[-count:]
    assert [(row["worker"], row["state"], row["memory_bytes"]) for row in last] == [
        (worker, "ended", None) for worker in first
    ]
    assert max(row["steps"] for row in last) > max(row["steps"] for row in facts_of(job, "worker")[:count])
    assert facts_of(job, "members")[-1]["lost"] == lost


@pytest.mark.slow
def test_a_terminal_shows_workers_below_the_output(digits: Path) -> None:
    words = command(digits, "--watch --workers rank --nproc-per-node 2", "--averages 8 --pause 0.02")
    code, shown = on_a_terminal(words[1:], {"PYTHONPATH": str(ROOT), "TERM": "xterm", "OMP_NUM_THREADS": "1"})
    assert code == 0
    terminal = Terminal(24, 120)
    terminal.feed(shown.encode())
    head, first, second, summary = terminal.lines[-4:]
    assert head.split()[:3] == ["worker", "rank", "host"]
    assert [line.split()[:2] for line in (first, second)] == [["0", "0"], ["1", "0"]]
    assert [line.rstrip().endswith("ended") for line in (first, second)] == [True, True]
    assert summary == "average 8"
    assert not any('"time"' in line for line in terminal.lines)


@pytest.mark.slow
@pytest.mark.sweep
def test_a_worker_that_is_killed_again_and_again_stops_no_other(start, digits: Path) -> None:
    """Also before it has joined."""
    job = start(command(digits, THREE, "--averages 250 --pause 0.05"))
    pids = {int(job.wait_for(STEP.format(worker))[0][1]): worker for worker in range(3)}
    agent, killed = children_of(job.agents[0].pid)[1], []
    for seconds in (3.0, 3.0, 0.2, 3.0, 0.0):
        killed.append(rank_of(agent, killed))
        os.kill(killed[-1], signal.SIGKILL)
        time.sleep(seconds)
    last = rank_of(agent, killed)
    worker = int(job.wait_for(rf"worker (\d+), .*\(pid {last}\) has joined with average \d+")[0][1])
    job.wait_for("ends with", 3)
    assert len(ends_of(job)) == 1
    for other in {*range(3)} - {pids[killed[0]]}:
        assert steps_of(job, other) == [*range(5, 1251, 5)]  # not one repeated, none left out
    steps = steps_of(job, worker)
    assert steps == [*range(steps[0], 1251, 5)]


@pytest.mark.slow
def test_a_frozen_worker_is_left_out_and_comes_back(start, digits: Path) -> None:
    options = "--averages 60 --pause 0.06 --codec top-k"
    job = start(command(digits, "--workers rank --nproc-per-node 2", options))
    pid = int(job.wait_for(STEP.format(1))[-1][1])
    os.kill(pid, signal.SIGSTOP)
    job.wait_for("worker 1, .* no sign of life for 1.2 s; 1 worker goes on")
    others = len(steps_of(job, 0))
    job.wait_for(STEP.format(0), others + 4)
    os.kill(pid, signal.SIGCONT)
    job.wait_for(r"worker 1, .* is back with average \d+")
    assert len(ends_of(job)) == 1
    assert steps_of(job, 0) == [*range(5, 301, 5)]


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize(("kind", "count", "later"), [("rank", 2, 3), ("rank", 3, 1), ("node", 2, 2)])
def test_a_job_resumes_on_another_number_of_workers(
    start, kind: str, count: int, later: int, digits: Path, tmp_path: Path
) -> None:
    """Also workers of two ranks."""
    for averages, number, steps in ((4, count, (5, 10, 15, 20)), (6, later, (25, 30))):
        options = f"--averages {averages} --checkpoint {tmp_path}"
        job = start(command(digits, f"--workers {kind} --nproc-per-node {number}", options))
        assert len(ends_of(job)) == 1
        assert {tuple(steps_of(job, worker)) for worker in range(number if kind == "rank" else 1)} == {steps}
    assert any("training begins with average 4" in line for line in job.lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "text"),
    [
        (["--heal"], "min_workers=1: members can change only where each worker has a world of its own"),
        (["--workers", "rank"], "--workers needs --heal"),
    ],
)
def test_workers_are_refused_without_their_options(start, digits: Path, launch: list[str], text: str) -> None:
    job = start([*RUN, *launch, SCRIPT, "--data", str(digits)])
    job.agents[0].wait(LIMIT_SECONDS)
    job.kill()
    assert any(text in line for line in job.lines), job.lines


@pytest.mark.slow
def test_a_worker_with_other_options_is_refused_and_stops_no_other(start, digits: Path, port: int) -> None:
    meet = f"--workers node --nnodes 1:2 --rdzv-endpoint 127.0.0.1:{port}"
    job = start(command(digits, meet, "--averages 5000 --pause 0.06"))
    job.wait_for(STEP.format(0), 3)
    other = start(command(digits, meet, "--averages 5000 --pause 0.06", sync_every=6))
    assert other.agents[0].wait(LIMIT_SECONDS) == 1
    other.kill()
    assert any("has sync_every 6, the members have 5" in line for line in other.lines), other.lines
    job.wait_for("refused: .* has sync_every 6, the members have 5")
    job.wait_for(STEP.format(0), len(steps_of(job, 0)) + 2)


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize(("loss", "nodes", "options"), [("killed", 3, ""), ("frozen", 3, ""), ("killed", 2, "--alone")])
def test_the_node_that_names_the_members_is_lost_and_no_worker_stops(
    start, loss: str, nodes: int, options: str, digits: Path, port: int
) -> None:
    """A frozen node comes back. The node that names the members shows the workers of all."""
    meet = f"--watch=json --workers node --nnodes 1:{nodes} --rdzv-endpoint 127.0.0.1:{port} {options}"
    words = command(digits, meet, "--averages 70 --pause 0.06")
    job = start(*[words] * nodes, after=lambda: listens_at(port))  # the first has the endpoint
    pids: list[int] = []
    try:
        for worker in range(nodes):  # those that come late have joined
            job.wait_for(STEP.format(worker), 2)
        wait_for_facts(job, members=[*range(nodes)], lost=[])
        for worker in range(nodes):
            wait_for_facts(job, worker=worker, state="running")
        pids = tree_of(job.agents[0].pid)
        lost = next(w for w in range(nodes) if int(job.wait_for(STEP.format(w))[0][1]) in pids)
        others = [w for w in range(nodes) if w != lost]
        if loss == "killed":
            job.kill_agent(0)  # and its worker with it
            wait_for_facts(job, members=others, lost=[lost])
        else:
            signal_each(pids, signal.SIGSTOP)
        job.wait_for("names the members from now on")
        if loss == "frozen":
            for worker in others:
                job.wait_for(STEP.format(worker), len(steps_of(job, worker)) + 4)
            signal_each(pids, signal.SIGCONT)
            job.wait_for(rf"worker {lost}, .* is back with average \d+")
        codes = [agent.wait(LIMIT_SECONDS) for agent in job.agents]
        assert codes == [-signal.SIGKILL if loss == "killed" else 0, *[0] * (nodes - 1)], job.lines
    finally:
        signal_each(pids, signal.SIGCONT)
    ends = [re.search(r"worker (\d+).* ends with .*digest (\w+)", line) for line in job.lines if "ends with" in line]
    assert len({found and found[2] for found in ends}) == 1
    assert sorted(int(found[1]) for found in ends if found) == (others if loss == "killed" else [*range(nodes)])
    for worker in others:
        steps = steps_of(job, worker)
        assert steps == [*range(steps[0], 351, 5)]  # not one repeated, none left out
