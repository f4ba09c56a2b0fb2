"""Stopped and killed jobs, and those that a signal ends, resume from their checkpoints: on as many ranks to the bit."""

import json
import os
import re
import shutil
import signal
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.processes import RUN, Ended, Program, mpiexec_command
from tests.ranks.checkpoint_job import STRATEGIES, Job
from tests.ranks.small_net import enter, on_ranks, spawned
from tests.ranks.test_gpu_emulated import on_gpus

EPOCHS = 2


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray], about: str) -> None:
    assert one.keys() == other.keys(), about
    for key, array in one.items():
        assert array.dtype == other[key].dtype
        np.testing.assert_array_equal(array, other[key], err_msg=f"{about}: {key}")
        assert array.tobytes() == other[key].tobytes(), f"{about}: {key}"


def stopped_and_resumed(optimizer, folder: str, strategies: list[str], options: dict) -> dict[str, np.ndarray]:
    """An undisturbed run, and one that stops twice, with new objects each time."""
    communicator = optimizer.communicator
    for strategy in strategies:
        own = Path(folder) / strategy
        whole = Job(communicator, strategy, **options)
        losses = whole.train(EPOCHS)
        steps = whole.checkpoint.steps
        seen = []
        for stop in (6, steps - 3, 10**9):
            job = Job(communicator, strategy, own, **options)
            resumed = job.checkpoint.resume()
            assert (resumed is None) == (stop == 6)
            if resumed:
                assert resumed.step == job.checkpoint.steps == max(step for step in seen if step % 4 == 0)
                assert job.checkpoint.epoch == resumed.epoch == (0 if resumed.step <= steps // 2 else 1)
            ended = job.train(EPOCHS, stop)
            seen = range(job.checkpoint.steps + 1)
            job.checkpoint.close()
        assert ended[-1] == losses[-1]
        assert_same_bits(whole.results(), job.results(), f"{strategy} on rank {optimizer.global_rank}")
        assert optimizer.global_rank or len(list(own.glob("step-*"))) == 3
    return {"steps": np.array(steps)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "strategies", "options"),
    [
        (3, STRATEGIES, {}),
        *((2, ["plain", "partialUpdate"], options) for options in ({"adam": True}, {"dropout": 0.5}, {"graph": True})),
    ],
    ids=str,
)
def test_a_job_goes_on_to_the_bit(tmp_path, world_size, strategies, options):
    steps = on_ranks(world_size, stopped_and_resumed, str(tmp_path), strategies, options)
    assert steps[0]["steps"] == 2 * (203 // world_size // 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"), [("sparseTopK", {"dropout": 0.5}), ("partialUpdate", {"graph": True})]
)
def test_jobs_on_gpus_go_on_to_the_bit(tmp_path, strategy, options):
    on_gpus(tmp_path, 2, partial(stopped_and_resumed, folder=str(tmp_path), strategies=[strategy], options=options))


def reloaded(optimizer, folder: str) -> dict[str, np.ndarray]:
    """States are written in place: a job whose steps are captured goes back and replays them."""
    job = Job(optimizer.communicator, "sparseTopK", folder, graph=True, every=5)
    assert job.checkpoint.resume() is None
    job.train(1)
    replays = job.net.graph_replays
    assert replays > 5
    whole, steps = job.results(), job.checkpoint.steps
    job.checkpoint.close()
    assert job.checkpoint.resume().step == steps
    assert_same_bits(job.results(), whole, "the last save")
    if optimizer.global_rank == 0:
        shutil.rmtree(Path(folder) / f"step-{steps:010d}")
    job.checkpoint.close()
    assert job.checkpoint.resume().step == 10
    job.train(1)
    assert job.net.graph_replays == replays + steps - 10
    assert_same_bits(job.results(), whole, "again")
    return {}


@pytest.mark.slow
def test_captured_steps_go_on_with_loaded_states(tmp_path):
    on_gpus(tmp_path, 2, partial(reloaded, folder=str(tmp_path / "checkpoints")))


# -- other numbers of ranks -------------------------------------------------------------------------------------------
def a_part(optimizer, folder: str, strategy: str, stop: int) -> dict[str, np.ndarray]:
    """The states that this rank resumes from, those after step `stop`, and the samples that it used in between."""
    job = Job(optimizer.communicator, strategy, folder, every=1)
    seeded = job.results()["notes"]
    job.checkpoint.resume()
    begun = job.results()
    job.train(3, stop)
    job.checkpoint.close()
    ended = {f"ended {key}": array for key, array in job.results().items()}
    return {**begun, **ended, "seeded": seeded, "used": np.concatenate(job.used)}


def generator(rank: dict[str, np.ndarray], notes: str, name: str) -> dict:
    return json.loads(rank[notes].tobytes())[name]


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("strategy", ["partialUpdate", "sparseTopK", "velocity", "warm-up", "power-sgd fed"])
def test_from_two_ranks_to_three_and_back(tmp_path, strategy, capfd):
    folder = str(tmp_path / "checkpoints")
    stops = (2, 3), (3, 7), (2, 10)
    parts = [spawned(tmp_path, world_size, enter, a_part, folder, strategy, stop) for world_size, stop in stops]
    for before, after in pairwise(parts):
        differed = 0
        for key in before[0]:
            if not key.startswith("ended ") or "notes" in key:
                continue
            old = [rank[key] for rank in before]
            mean = np.mean(old, axis=0, dtype=np.float64) if old[0].dtype.kind == "f" else old[0]
            for rank in after:
                assert_same_bits({key: mean.astype(old[0].dtype)}, {key: rank[key.removeprefix("ended ")]}, key)
            differed += any((array != old[0]).any() for array in old)
        assert differed > 2, "nothing was to be averaged"
    # Augmentation: ranks 0 and 1 continue their own streams; rank 2 draws from its own. Dropout's stream is common.
    for rank in (0, 1):
        for before, after in pairwise(parts):
            assert generator(before[rank], "ended notes", "noise") == generator(after[rank], "notes", "noise")
    assert generator(parts[1][2], "notes", "noise") == generator(parts[1][2], "seeded", "noise")
    assert len({json.dumps(generator(rank, "notes", "noise")) for rank in parts[1]}) == 3
    common = [generator(rank, "notes", "device0.host_rng") for rank in (*parts[1], *parts[0])]
    assert all(other == common[0] for other in common)
    # No sample of the epoch is used twice.
    used = np.concatenate([rank["used"] for part in parts for rank in part])
    assert len(used) == len(set(used)) == (3 * 2 + 4 * 3 + 3 * 2) * 8
    first, second = [line for line in capfd.readouterr().err.splitlines() if "was saved by" in line]
    text = "was saved by 2 ranks and resumes with 3.*become their mean over the 2, rank 2 and above draw"
    assert re.search(text, first)
    assert "was saved by 3 ranks and resumes with 2" in second
    assert "draw" not in second


# -- signals: all ranks leave after the same step, whichever rank they reached -----------------------------------------
def start(folder: Path, launcher: list[str], env: dict[str, str] | None = None) -> Program:
    """A job of 30 epochs of 12 steps.

    It leaves after four times as many as it had made, at the latest. Pauses keep it from its end, however late the
    signal comes on a busy machine.
    """
    folder.mkdir(exist_ok=True)
    command = ["-m", "tests.ranks.checkpoint_job", "2", str(folder / "checkpoints"), "sparseTopK", "30", str(folder)]
    return Program([*launcher, sys.executable, *command], env)


def preempted(folder: Path, launcher: list[str], who: str, signum: int, env: dict[str, str] | None = None) -> Ended:
    """Start the job, wait for its first epoch, send the signal to `who`, and see it end."""
    program = start(folder, launcher, {"EPOCH_PAUSE": "1", **(env or {})}).ready(1)
    ranks = [pid for pid, command in program.pids().items() if re.search(who, command)]
    os.kill(program.process.pid if who == "launcher" else max(ranks), signum)
    return program.end()


def step_of(ended: Ended, signum: signal.Signals) -> int:
    (line,) = re.findall(rf"^{signum.name}: the job leaves after step (\d+), saved in .*$", ended.stderr, re.MULTILINE)
    return int(line)


@pytest.mark.slow
def test_spawned_ranks_leave_together_and_end_like_an_undisturbed_job(tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    start(whole, []).end(code=0)
    for who, signum in (("launcher", signal.SIGTERM), ("spawn_main", signal.SIGUSR1)):
        ended = preempted(again, [], who, signum)
        assert ended.code == 128 + signum, ended
        step = step_of(ended, signum)
        assert (again / "checkpoints" / f"step-{step:010d}" / "rank-00001.safetensors").exists()
        assert ended.stderr.endswith(f"{signum.name}: all 2 ranks have been ended\n")
        assert "Traceback" not in ended.stderr
    ended = start(again, []).end(code=0)
    assert f"resuming from step {step}\n" in ended.stdout
    for rank in (0, 1):
        one, other = (dict(np.load(folder / f"{rank}.npz")) for folder in (whole, again))
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
    env = {"SLURM_JOB_ID": "20", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    env["PATH"] = f"{scontrol.parent}:{os.environ['PATH']}"
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


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize(
    ("method", "signum"), [("fork", signal.SIGTERM), ("spawn", signal.SIGUSR1), ("forkserver", signal.SIGTERM)]
)
def test_workers_outlive_a_signal_to_all_processes(script, tmp_path, method, signum):
    pytest.importorskip("torch")
    program = Program([*RUN, "--nproc-per-node", "2", script(WITH_WORKERS), method, str(tmp_path / "saved")]).ready(1)
    for pid in program.pids():
        os.kill(pid, signum)
    ended = program.end(code=128 + signum)
    step = step_of(ended, signum)
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == [f"step-{step:010}"]
    assert "Traceback" not in ended.stderr
