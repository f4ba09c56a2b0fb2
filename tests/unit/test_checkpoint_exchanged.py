"""A checkpoint in which files of ranks have been exchanged: each is whole, and none is where it belongs."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.processes import Ended, Program


def start(folder, epochs: int) -> Ended:
    results = folder / "results"
    results.mkdir(exist_ok=True)
    job = [
        "-m",
        "tests.ranks.checkpoint_job",
        "2",
        str(folder / "checkpoints"),
        "sparseTopK",
        str(epochs),
        str(results),
    ]
    return Program([sys.executable, *job]).end(100.0)


def exchanged(newest) -> None:
    first, second = newest / "rank-00000.safetensors", newest / "rank-00001.safetensors"
    aside = newest / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def copied(newest) -> None:
    shutil.copyfile(newest / "rank-00000.safetensors", newest / "rank-00001.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [exchanged, copied])
def test_a_file_of_another_rank_is_refused_by_name(tmp_path, damage):
    assert start(tmp_path, 2).code == 0
    *_, before, newest = sorted((tmp_path / "checkpoints").glob("step-*"))
    damage(newest)
    ended = start(tmp_path, 3)
    assert ended.code == 0, ended
    assert f"resuming from step {int(before.name.removeprefix('step-'))}\n" in ended.stdout, ended
    refusal = next(line for line in ended.stderr.splitlines() if newest.name in line)
    assert "rank-0000" in refusal
    assert "of rank " in refusal
