"""Ranks and hosts of a job in shards come and go: it ends with the bits of an undisturbed job of any other size."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.faults.healing import RUN
from tests.processes import ROOT

JOB, TORCH = ["-m", "tests.ranks.healed"], ["-m", "tests.torch.elastic"]
PORT = 29_487
SWEEP = [pytest.mark.slow, pytest.mark.sweep]


def run(ranks: int, *words: str, **variables: str) -> list[str]:
    """Lines of a job on one node."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [*RUN[:-1], str(ranks), *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).splitlines()


def ends_of(lines: list[str]) -> set[str]:
    return {line.partition("ends with")[2] for line in lines if "ends with" in line}


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("script", "after"),
    [
        (JOB, 3),
        *(pytest.param(JOB, after, marks=SWEEP) for after in (1, 2)),
        (JOB, 8),
        ([*TORCH, "dist-opt"], 2),
        pytest.param([*TORCH, "ddp"], 3, marks=SWEEP),
    ],
)
def test_a_checkpoint_of_four_ranks_resumes_on_others(tmp_path, script, after):
    if script != JOB:
        pytest.importorskip("torch")
    job, log = [*script, "--every", "20", "--pause", "0", "--folder"], {"DISTOPT_HASH": "every"}
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    [want] = ends_of(run(1, *job, one, "--steps", "45", **log))
    run(4, *job, other, "--steps", "27", **log)
    lines = run(after, *job, other, "--steps", "45", **log)
    assert ends_of(lines) == {want}
    assert [line for line in lines if re.search(rf"rank 0 is \d+ after 20, one of {after}, resumed from 4$", line)]
    assert any(f"was saved by 4 ranks and resumes with {after}" in line for line in lines)
    diff = [sys.executable, "-m", "distopt", "diff", one, other]
    done = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "steps in both logs: 45, from 1 to 45, with the same bits",
        "checkpoints of both runs: 2, with the same bits",
        *([f"ranks of each host: 1 | {after}"] if after != 1 else []),
    ]


def test_a_rank_that_cannot_be_started_again_is_left_out_until_the_next_fault(start, tmp_path):
    want = ends_of(run(1, *JOB, "--steps", "200", "--pause", "0"))
    # Rank 1 of attempts 1 and 2 is killed at once; attempt 3 does without it.
    paced = ["--steps", "200", "--pause", "0.2", "--until", str(tmp_path / "end")]
    job = start([*RUN[:-1], "1:2", "--heal", *JOB, *paced, "--lost", "1:1:2"])
    job.fork_server()
    job.more_steps()
    os.kill(job.pid_of(1), signal.SIGKILL)
    job.wait_for(r"rank 1 on .* was ended by SIGKILL.*; continuing with 1 of 2 ranks on .*; healed: ")
    assert job.wait_for(r"rank 0 is \d+ after (\d+), one of 1, resumed from 2$")[0][1] != "0"
    job.more_steps()
    os.kill(job.pid_of(0), signal.SIGKILL)
    job.wait_for("; healed: ", 2)
    assert job.wait_for(r"rank 1 is \d+ after (\d+), one of 2, resumed from 1$")[0][1] != "0"
    (tmp_path / "end").touch()
    assert set(job.end()) == want


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "folder"),
    [
        (JOB, False),
        pytest.param(JOB, True, marks=SWEEP),
        *(pytest.param([*TORCH, front], False, marks=SWEEP) for front in ("dist-opt", "ddp")),  # minutes
    ],
)
def test_a_host_is_lost_and_comes_back(start, net, tmp_path, script, folder):
    if script != JOB:
        pytest.importorskip("torch")
    want = ends_of(run(1, *script, "--steps", "300", "--pause", "0"))
    options = ["--folder", str(tmp_path / "saved")] if folder else []
    paced = ["--steps", "300", "--pause", "0.3", "--until", str(tmp_path / "end")]
    meet = ["--heal", "--nnodes", "1:2", "--rdzv-endpoint", f"{net.hosts[0].address}:{PORT}"]
    words = [*RUN, *meet, *script, *paced, *options]
    job = start(*(host.inside(words) for host in net.hosts))
    job.wait_for(r"rank 3 is \d+ after \d+, one of 4, ")  # one host may have come first
    job.more_steps()
    before = sum("; healed: " in line for line in job.lines)
    os.kill(job.pid_of(3), signal.SIGKILL)
    job.wait_for("; healed: ", before + 1)
    job.kill_agent(1)  # and its ranks, and the states that they have kept
    job.wait_for("node 1 .* cannot be reached.*; continuing with 1 of 2 nodes")
    job.wait_for("cannot be reached.*; healed: ")
    job.wait_for(r"rank 1 is \d+ after \d+, one of 2, resumed from 4$")
    job.more_steps()
    came = sum("has come; healed: " in line for line in job.lines)
    job.start_agent(1)
    job.wait_for("has come; healed: ", came + 1)
    assert job.wait_for(r"rank 3 is \d+ after (\d+), one of 4, resumed from 2$")[0][1] != "0"
    job.more_steps()
    net.cut(silently=True)  # the agent and its ranks live, and keep states of steps that are done again
    job.wait_for("continuing with 1 of 2 nodes", 2)
    job.wait_for("cannot be reached.*; healed: ", 2)
    job.more_steps()
    net.mend()
    job.wait_for("has come; healed: ", came + 2)
    job.more_steps()
    job.kill_agent(0)  # the owner of the endpoint
    job.wait_for("the node that owns .* cannot be reached; waiting for it")
    job.start_agent(0)
    job.wait_for("the node that owned the job, .*; healed: ")
    (tmp_path / "end").touch()
    assert set(job.end()) == want
