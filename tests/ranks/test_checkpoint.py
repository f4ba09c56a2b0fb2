"""Stopped and killed jobs resume from their checkpoints: with as many ranks, bit for bit."""

import json
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.ranks.checkpoint_job import STRATEGIES, Job
from tests.ranks.small_net import on_ranks
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
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_strategy_goes_on_to_the_bit(tmp_path, world_size):
    ranks = on_ranks(tmp_path, world_size, stopped_and_resumed, str(tmp_path), STRATEGIES, {})
    assert ranks[0]["steps"] == 2 * (203 // world_size // 8)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"adam": True}, {"dropout": 0.5}, {"graph": True}], ids=str)
def test_other_jobs_go_on_to_the_bit(tmp_path, options):
    on_ranks(tmp_path, 2, stopped_and_resumed, str(tmp_path), ["plain", "partialUpdate"], options)


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


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("strategy", ["partialUpdate", "sparseTopK", "velocity", "warm-up", "power-sgd fed"])
def test_from_two_ranks_to_three_and_back(tmp_path, strategy, capfd):
    folder = str(tmp_path / "checkpoints")
    parts = [
        on_ranks(tmp_path, world_size, a_part, folder, strategy, stop) for world_size, stop in ((2, 3), (3, 7), (2, 10))
    ]
    for before, after in pairwise(parts):
        differed = 0
        for key in before[0]:
            if not key.startswith("ended ") or "notes" in key:
                continue
            old = [rank[key] for rank in before]
            for rank in after:
                new = rank[key.removeprefix("ended ")]
                if old[0].dtype.kind == "f":
                    assert_same_bits(
                        {key: np.mean(old, axis=0, dtype=np.float64).astype(old[0].dtype)}, {key: new}, key
                    )
                else:
                    np.testing.assert_array_equal(old[0], new)
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
    said = [line for line in capfd.readouterr().err.splitlines() if "was saved by" in line]
    assert len(said) == 2
    assert "was saved by 2 ranks and resumes with 3" in said[0]
    assert "become their mean over the 2, rank 2 and above draw" in said[0]
    assert "was saved by 3 ranks and resumes with 2" in said[1]
    assert "draw" not in said[1]
