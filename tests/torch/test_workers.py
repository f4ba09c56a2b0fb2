"""`distopt run --workers`: workers of one machine that are killed, frozen, late, and refused."""

import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.data import idx, synthetic
from tests.faults.healing import Job
from tests.processes import LIMIT_SECONDS, ROOT

pytest.importorskip("torch")

SCRIPT = str(ROOT / "examples" / "pytorch" / "mnist_workers.py")
RUN = [sys.executable, "-W", "ignore", "-m", "distopt", "run"]
STEP = r"worker {} \(pid (\d+)\): step (\d+),"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    for part, count in (("train", 512), ("t10k", 100)):
        images, labels = synthetic.digits(count, 1)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx.encode(images.reshape(count, 28, 28)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx.encode(labels.astype(np.uint8)))
    return folder


@contextlib.contextmanager
def started(digits: Path, *options: str, launch: tuple[str, ...] = ("--workers", "rank")) -> Iterator[Job]:
    batch = ["--batch-size", "4", "--sync-every", "5"]
    job = Job([*RUN, "--heal", *launch, SCRIPT, "--data", str(digits), *batch, *options])
    try:
        yield job
    finally:
        job.kill()


def listens_at(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def steps_of(job: Job, worker: int) -> list[int]:
    return [int(found[2]) for line in list(job.lines) if (found := re.search(STEP.format(worker), line))]


def ends_of(job: Job) -> set[str]:
    """The digests of all workers at the end."""
    assert [agent.wait(LIMIT_SECONDS) for agent in job.agents] == [0], job.lines
    ends = [line.partition("digest ")[2] for line in job.lines if "ends with" in line]
    assert ends, job.lines
    return set(ends)


@pytest.mark.slow(kept=1)
def test_a_killed_worker_stops_no_other_and_joins_again(digits: Path) -> None:
    with started(
        digits, "--averages", "400", "--pause", "0.02", launch=("--workers", "rank", "--nproc-per-node", "2")
    ) as job:
        pid = int(job.wait_for(STEP.format(1))[-1][1])
        os.kill(pid, signal.SIGKILL)
        job.wait_for("worker 1, .* has ended or cannot be reached; 1 worker goes on")
        job.wait_for(r"worker 2, .* has joined with average \d+")
        joined = int(job.wait_for(STEP.format(2))[0][2])
        job.wait_for("ends with", 2)
        assert len(ends_of(job)) == 1
        steps = steps_of(job, 0)
        assert steps == [*range(5, 2001, 5)]  # not one repeated, none left out
        assert steps_of(job, 2) == [*range(joined, 2001, 5)]


@pytest.mark.slow
def test_a_frozen_worker_is_left_out_and_comes_back(digits: Path) -> None:
    options = ["--averages", "200", "--pause", "0.02", "--codec", "top-k"]
    with started(digits, *options, launch=("--workers", "rank", "--nproc-per-node", "2")) as job:
        pid = int(job.wait_for(STEP.format(1))[-1][1])
        os.kill(pid, signal.SIGSTOP)
        job.wait_for("worker 1, .* no sign of life for 1.2 s; 1 worker goes on")
        others = len(steps_of(job, 0))
        job.wait_for(STEP.format(0), others + 4)
        os.kill(pid, signal.SIGCONT)
        job.wait_for(r"worker 1, .* is back with average \d+")
        assert len(ends_of(job)) == 1
        assert steps_of(job, 0) == [*range(5, 1001, 5)]


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize(("kind", "count", "later"), [("rank", 2, 3), ("rank", 3, 1), ("node", 2, 2)])
def test_a_job_resumes_on_another_number_of_workers(
    kind: str, count: int, later: int, digits: Path, tmp_path: Path
) -> None:
    """Also workers of two ranks."""
    for averages, number, steps in ((4, count, (5, 10, 15, 20)), (6, later, (25, 30))):
        launch = ("--workers", kind, "--nproc-per-node", str(number))
        with started(digits, "--averages", str(averages), "--checkpoint", str(tmp_path), launch=launch) as job:
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
def test_workers_are_refused_without_their_options(digits: Path, launch: list[str], text: str) -> None:
    job = Job([*RUN, *launch, SCRIPT, "--data", str(digits)])
    job.agents[0].wait(LIMIT_SECONDS)
    job.kill()
    assert any(text in line for line in job.lines), job.lines


@pytest.mark.slow
def test_a_worker_with_other_options_is_refused_and_stops_no_other(digits: Path, port: int) -> None:
    meet = ["--workers", "node", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command = [*RUN, "--heal", *meet, SCRIPT, "--data", str(digits), "--batch-size", "4", "--pause", "0.02"]
    job = Job([*command, "--sync-every", "5", "--averages", "5000"])
    try:
        job.wait_for(STEP.format(0), 3)
        other = Job([*command, "--sync-every", "6", "--averages", "5000"])
        assert other.agents[0].wait(LIMIT_SECONDS) == 1
        other.kill()
        assert any("has sync_every 6, the members have 5" in line for line in other.lines), other.lines
        job.wait_for("refused: .* has sync_every 6, the members have 5")
        job.wait_for(STEP.format(0), len(steps_of(job, 0)) + 2)
    finally:
        job.kill()


@pytest.mark.slow
def test_the_node_that_names_the_members_is_killed_and_no_worker_stops(digits: Path, port: int) -> None:
    meet = ["--workers", "node", "--nnodes", "1:3", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command = [*RUN, "--heal", *meet, SCRIPT, "--data", str(digits), "--batch-size", "4", "--pause", "0.02"]
    command += ["--sync-every", "5", "--averages", "120"]
    job = Job(command, command, command, after=lambda: listens_at(port))  # the first has the endpoint
    try:
        for worker in range(3):  # those that come late have joined
            job.wait_for(STEP.format(worker), 2)
        job.kill_agent(0)  # and its worker with it
        job.wait_for("names the members from now on")
        assert [agent.wait(LIMIT_SECONDS) for agent in job.agents[1:]] == [0, 0], job.lines
    finally:
        job.kill()
    ends = [re.search(r"worker (\d+).* ends with .*digest (\w+)", line) for line in job.lines if "ends with" in line]
    assert len(ends) == 2, job.lines
    assert len({found and found[2] for found in ends}) == 1
    for found in ends:
        assert found is not None
        steps = steps_of(job, int(found[1]))
        assert steps == [*range(steps[0], 601, 5)]  # not one repeated, none left out
