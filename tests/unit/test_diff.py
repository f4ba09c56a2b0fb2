"""`distopt diff` and the log of hashes that DISTOPT_HASH writes."""

import json
import shutil

import numpy as np
import pytest

from distopt import cli
from distopt.checkpoint import Checkpoint, checkpoint
from distopt.checkpoint.hashes import LOG, read_log
from distopt.cli.diff import how_much
from distopt.errors import CheckpointError, UsageError
from tests.unit.refusals import refused


def train(folder, steps=6, *, every=3, at=None, change=None, kill_at=None) -> None:
    """States that depend on name and step; those of step `at` on are changed by `change`."""
    model = {"w": np.ones((3, 4), np.float32), "b": np.ones(5)}
    numbers = np.arange(4)
    saver = Checkpoint(folder, every=every, keep=9, model=model, numbers=numbers)
    saver.resume()
    while saver.steps < steps:
        step = saver.steps + 1
        for place, array in enumerate((*model.values(), numbers)):
            array[...] = (array * 3 + np.arange(array.size).reshape(array.shape) + place + step) % 17
        if step == at:
            change(model)
        saver.step()
        if step == kill_at:
            saver._wait()
            saver._abandon()  # as the end of a process does
            raise KeyboardInterrupt
    saver.close()


def next_float(model) -> None:
    model["b"][2:4] = np.nextafter(model["b"][2:4], np.inf)


@pytest.fixture
def diff(tmp_path, capsys):
    """`distopt diff` of runs below `tmp_path`: what it says, with this exit code."""

    def told(code: int, *runs: str) -> str:
        assert cli.main(["diff", *(str(tmp_path / run) for run in runs)]) == code
        said = capsys.readouterr()
        return said.out + said.err

    return told


@pytest.fixture
def every(monkeypatch) -> None:
    """Steps are hashed, into the folder of the checkpoints."""
    monkeypatch.setenv("DISTOPT_HASH", "every")


@pytest.mark.parametrize("hashes", [True, False])
def test_the_first_step_and_array_that_differ_and_by_how_much(tmp_path, monkeypatch, diff, hashes):
    if hashes:
        monkeypatch.setenv("DISTOPT_HASH", "every")
    train(tmp_path / "a")
    train(tmp_path / "b", at=2, change=next_float)
    train(tmp_path / "c")
    text = diff(0, "a", "c")
    assert "checkpoints of both runs: 2, with the same bits" in text
    assert ("steps in both logs: 6, from 1 to 6, with the same bits" in text) == hashes
    text = diff(1, "a", "b")
    assert ("step 2: model/b differs; 1 of 3 arrays differ\n" in text) == hashes
    assert text.splitlines()[-1].startswith("checkpoint of step 3: model/b differs in 2 of 5 elements, by at most ")
    assert "checkpoint of step 6: model/b differs in " in diff(1, "a/step-0000000006", "b")


def test_logs_are_enough_and_settings_that_differ_are_told(tmp_path, monkeypatch, diff):
    for name in "ab":
        monkeypatch.setenv("DISTOPT_HASH", str(tmp_path / name))
        train(None, at=5 if name == "b" else None, change=next_float)
    assert diff(1, f"a/{LOG}", "b") == (
        "step 5: model/b differs; 1 of 3 arrays differ\n"
        "no checkpoint of both from step 5 on differs: save one to see by how much\n"
    )
    for name, isa in (("a", "avx2"), ("b", "portable")):
        monkeypatch.setattr(checkpoint, "settings_of", lambda _, isa=isa: {"instruction set": isa, "numpy": "2"})
        train(tmp_path / name)
    same = "checkpoints of both runs: 2, with the same bits\ninstruction set: avx2 | portable\n"
    assert diff(0, "a", "b") == same


def test_a_log_goes_on_when_the_run_resumes_and_begins_anew_with_it(tmp_path, every):
    train(tmp_path / "a")
    refused(KeyboardInterrupt, "", train, tmp_path / "b", kill_at=5, at=5, change=next_float)
    log = tmp_path / "b" / LOG
    log.write_text(log.read_text()[:-20])  # the end of the process has cut it
    assert sorted(read_log(log)[0]) == [1, 2, 3, 4]
    train(tmp_path / "b")
    assert read_log(log) == read_log(tmp_path / "a" / LOG)
    assert list(read_log(log)[0][1]) == ["model/w", "model/b", "numbers/"]
    steps = [json.loads(line).get("step") for line in log.read_text().splitlines() if line.endswith("}")]
    assert steps == [None, 1, 2, 3, 4, None, 4, 5, 6]
    train(tmp_path / "b", steps=0)
    assert sorted(read_log(log)[0]) == [1, 2, 3, 4, 5, 6]
    for folder in (tmp_path / "b").glob("step-*"):
        shutil.rmtree(folder)
    train(tmp_path / "b", steps=2)
    assert sorted(read_log(log)[0]) == [1, 2]


@pytest.mark.parametrize(
    "line",
    [b'{"names": ["a"], "settings": {"numpy": "2"}\n', b"\x87\xff}\n", b"[1]}\n", b'{"step": 3, "arrays": ["12'],
    ids=repr,
)
def test_a_cut_line_of_a_log_is_left_out(tmp_path, every, line):
    train(tmp_path, steps=2)
    log = tmp_path / LOG
    whole = read_log(log)
    log.write_bytes(log.read_bytes() + line)
    assert read_log(log) == whole


@pytest.mark.parametrize(
    "line", ['{"step": 1}', '[1, "names"]', "7", '{"names": 3, "settings": 1}\n{"step": 1, "arrays": [1]}']
)
def test_a_file_that_is_no_log_is_named(tmp_path, diff, line):
    (tmp_path / LOG).write_text(line)
    assert "is no log of DISTOPT_HASH" in diff(1, "", "")


@pytest.mark.parametrize("steps", [0, 2])
def test_a_log_that_cannot_be_written_is_named_with_the_cure(tmp_path, monkeypatch, steps):
    place = tmp_path / "place"
    monkeypatch.setenv("DISTOPT_HASH", str(place))
    if steps:
        place.mkdir()
        (place / LOG).symlink_to("/dev/full")
    else:
        place.write_text("a file")
    error = "the hashes of DISTOPT_HASH cannot be written: .*, or choose another folder"
    refused(CheckpointError, error, train, tmp_path / "a", steps)


def test_nothing_to_compare(tmp_path, diff):
    for name, steps in (("none", 0), ("two", 2), ("three", 3), ("four", 4), ("six", 6)):
        train(tmp_path / name, steps)
    for runs in (("three", "none"), ("two", "four")):
        assert "has neither whole checkpoints nor hashes.jsonl" in diff(2, *runs)
    assert "no step in common" in diff(2, "three/step-0000000003", "six/step-0000000006")


def test_without_a_place_or_unset_there_is_no_log(monkeypatch, tmp_path, every):
    refused(UsageError, "DISTOPT_HASH=every is for a Checkpoint with a folder", train, None)
    monkeypatch.delenv("DISTOPT_HASH")
    monkeypatch.setattr(checkpoint, "HashLog", None)
    looked = []
    monkeypatch.setattr(checkpoint, "adapters_of", lambda objects: looked.append(1) or {})
    saver = Checkpoint(tmp_path, w=np.ones(3))
    saver.resume()
    before = len(looked)
    saver.step()
    assert len(looked) == before
    saver.close()
    assert not (tmp_path / LOG).exists()


F = np.float32


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (F([1, 2]), F([1, 2]), ""),
        (F([0.0, 2]), F([-0.0, 2]), "differs in 1 of 2 elements, by at most 0 (1 ulp)"),
        (F([1, -1]), F([1 + 2**-23, -1 - 2**-22]), "differs in 2 of 2 elements, by at most 2.38e-07 (2 ulp)"),
        (F(1e-45), F(-1e-45), "differs in 1 of 1 elements, by at most 2.8e-45 (3 ulp)"),
        (np.float16([1, 2]), np.float16([1, 4]), "differs in 1 of 2 elements, by at most 2 (1024 ulp)"),
        (F([1, 2, 3]), F([np.nan, 2, 4]), "differs in 2 of 3 elements, 1 of them NaN in one run only"),
        (F([np.nan, 2]), F([np.nan, 2]), ""),
        (np.int64([7, -1]), np.int64([7, 1]), "differs in 1 of 2 elements, by at most 2"),
        (np.uint8([255]), np.uint8([0]), "differs in 1 of 1 elements, by at most 255"),
        (np.bool_([True]), np.bool_([False]), "differs in 1 of 1 elements, by at most 1"),
        (np.zeros(3), np.zeros((3, 1)), "is float64 of shape (3,), and float64 of shape (3, 1)"),
        (np.zeros(3), None, "is in one run only"),
        ("0f", "0e", "differs"),
        ("0f", "0f", ""),
    ],
)
def test_how_much(one, other, text):
    assert how_much(one, other) == text


def test_a_log_of_an_earlier_run_is_not_taken_for_that_of_the_checkpoints(tmp_path, monkeypatch, diff, every):
    train(tmp_path / "a")
    train(tmp_path / "b")
    log = (tmp_path / "b" / LOG).read_bytes()
    for folder in (tmp_path / "b").glob("step-*"):
        shutil.rmtree(folder)
    monkeypatch.delenv("DISTOPT_HASH")
    train(tmp_path / "b", at=2, change=next_float)
    assert not (tmp_path / "b" / LOG).exists()
    (tmp_path / "b" / LOG).write_bytes(log)
    text = diff(1, "a", "b")
    assert f"{tmp_path / 'b' / LOG} is of another run than the checkpoints beside it, and is left out\n" in text
    assert "checkpoint of step 3: model/b differs" in text
    assert "same bits" not in text


def test_a_run_that_resumes_without_a_log_cuts_the_one_that_is_there(tmp_path, monkeypatch, every):
    refused(KeyboardInterrupt, "", train, tmp_path, kill_at=5)
    monkeypatch.delenv("DISTOPT_HASH")
    train(tmp_path, at=4, change=next_float)
    assert sorted(read_log(tmp_path / LOG)[0]) == [1, 2, 3]
    monkeypatch.setenv("DISTOPT_HASH", "every")
    train(tmp_path, steps=8)
    assert sorted(read_log(tmp_path / LOG)[0]) == [1, 2, 3, 7, 8]
