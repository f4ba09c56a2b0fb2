"""Jobs that a signal ends: all ranks leave after the same step, whichever rank it reached, and the job resumes."""

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.processes import Ended, Program, mpiexec_command
from tests.ranks.test_checkpoint import assert_same_bits

# Of 12 steps each. The job leaves after four times as many as it had made, at the latest. Pauses keep it from its end,
# however late the signal comes on a busy machine.
EPOCHS = 30
PAUSED = {"EPOCH_PAUSE": "1"}


def start(folder: Path, launcher: list[str], env: dict[str, str] | None = None) -> Program:
    folder.mkdir(exist_ok=True)
    command = ["-m", "tests.ranks.checkpoint_job", "2", str(folder / "checkpoints"), "sparseTopK"]
    return Program([*launcher, sys.executable, *command, str(EPOCHS), str(folder)], env)


def preempted(folder: Path, launcher: list[str], who: str, signum: int, env: dict[str, str] | None = None) -> Ended:
    """Start the job, wait for its first epoch, send the signal to `who`, and see it end."""
    program = start(folder, launcher, PAUSED | (env or {}))
    program.read_lines(1)
    if who == "launcher":
        pid = program.process.pid
    else:
        ranks = [pid for pid, command in program.pids().items() if re.search(who, command)]
        pid = max(ranks)
    os.kill(pid, signum)
    return program.end()


def results(folder: Path) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(folder / f"{rank}.npz")) for rank in (0, 1)]


def step_of(ended: Ended, signum: signal.Signals) -> int:
    (line,) = re.findall(rf"^{signum.name}: the job leaves after step (\d+), saved in .*$", ended.stderr, re.MULTILINE)
    return int(line)


@pytest.mark.slow
def test_spawned_ranks_leave_together_and_end_like_an_undisturbed_job(tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert start(whole, []).end().code == 0
    for who, signum in (("launcher", signal.SIGTERM), ("spawn_main", signal.SIGUSR1)):
        ended = preempted(again, [], who, signum)
        assert ended.code == 128 + signum, ended
        step = step_of(ended, signum)
        assert (again / "checkpoints" / f"step-{step:010d}" / "rank-00001.safetensors").exists()
        assert ended.stderr.endswith(f"{signum.name}: all 2 ranks have been ended\n")
        assert "Traceback" not in ended.stderr
    ended = start(again, []).end()
    assert ended.code == 0, ended
    assert f"resuming from step {step}\n" in ended.stdout
    for one, other in zip(results(whole), results(again), strict=True):
        assert_same_bits(one, other, "preempted twice")


@pytest.mark.slow
def test_mpiexec_passes_the_signal_on_and_gives_its_code(tmp_path):
    launcher = mpiexec_command(2)
    ended = preempted(tmp_path, launcher, "launcher", signal.SIGUSR1)
    assert ended.code == 128 + signal.SIGUSR1, ended
    step = step_of(ended, signal.SIGUSR1)
    program = start(tmp_path, launcher)
    said = f"resuming from step {step}"
    assert program.read_lines(2)[0] in (said, 2 * said)  # both ranks write to one pipe
    program.kill()
    program.end()


SCONTROL = """#!/bin/sh
echo "$@" >> {calls}
case $1 in
  show) echo "JobId=17 JobName=x JobState={state} Reason=None";;
  requeue) {requeue};;
esac
"""


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("state", "requeue", "code", "said"),
    [
        ("RUNNING", "exit 0", 0, "it will be started again"),
        ("RUNNING", "echo not so >&2; exit 1", 138, "Slurm does not queue job 17_3 again: not so"),
        ("CANCELLED", "exit 0", 138, "Slurm ends job 17_3 itself (CANCELLED)"),
    ],
    ids=["running", "refused", "cancelled"],
)
def test_slurm_is_asked_once_to_queue_a_running_job_again(tmp_path, state, requeue, code, said):
    calls, scontrol = tmp_path / "calls", tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(SCONTROL.format(calls=calls, state=state, requeue=requeue))
    scontrol.chmod(0o755)
    env = {
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "20",
        "SLURM_ARRAY_JOB_ID": "17",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    ended = preempted(tmp_path, [], "launcher", signal.SIGUSR1, env)
    assert ended.code == code, ended
    assert re.search(rf"; {re.escape(said)}$", ended.stderr, re.MULTILINE), ended.stderr
    asked = calls.read_text().splitlines()
    assert asked == ["show job --oneliner 17_3", *(["requeue 17_3"] if state == "RUNNING" else [])]
    assert "Traceback" not in ended.stderr


# Each step needs a number of a worker, and a DataLoader's processes where there is PyTorch.
WITH_WORKERS = """
import multiprocessing, os, sys, time
import numpy as np
import distopt
from distopt.checkpoint import Checkpoint

def work(sink):
    for number in range(10**6):
        sink.send(number)

def hold_on():
    while True:
        time.sleep(1)

class Numbers:
    def __len__(self):
        return 10**6

    def __getitem__(self, i):
        return i

if __name__ == "__main__":
    method, folder = sys.argv[1:]
    world, state = distopt.init(), np.zeros(1)
    checkpoint = Checkpoint(folder, preemptible=True, state=state)
    resumed = checkpoint.resume()
    context = multiprocessing.get_context(method)
    source, sink = context.Pipe(False)
    context.Process(target=work, args=(sink,), daemon=True).start()
    context.Process(target=hold_on).start()  # which the rank would wait for at its end
    sink.close()
    if method != "spawn" or world.rank == 0:
        from torch.utils.data import DataLoader

        loader = DataLoader(Numbers(), num_workers=1, persistent_workers=True, multiprocessing_context=method)
        batches = iter(loader)
    else:
        batches = iter(range(10**6))
    while checkpoint.steps < 10**5:
        state += source.recv() + int(next(batches)) * 0
        time.sleep(0.02)
        checkpoint.step(0)
        if world.rank == 0 and checkpoint.steps == 5:
            print("five steps", flush=True)
"""


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(
    ("method", "signum"),
    [("fork", signal.SIGTERM), ("spawn", signal.SIGUSR1), ("forkserver", signal.SIGTERM), ("spawn", signal.SIGTERM)],
)
def test_workers_outlive_a_signal_to_all_processes(tmp_path, method, signum):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(WITH_WORKERS)
    launcher = [sys.executable, "-m", "distopt", "run", "--nproc-per-node", "2", str(script)]
    program = Program([*launcher, method, str(tmp_path / "saved")])
    program.read_lines(1)
    for pid in program.pids():
        os.kill(pid, signum)
    ended = program.end()
    assert ended.code == 128 + signum, ended.stderr
    step = step_of(ended, signum)
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == [f"step-{step:010}"]
    assert "Traceback" not in ended.stderr
