"""`distopt bench train`: samples, the table, the exit code, and a small real run."""

from __future__ import annotations

import json
import math

import pytest

from distopt import cli
from distopt.cli.bench import train
from distopt.cli.bench.crew import CrewError
from distopt.cli.bench.train import Result


def answer(seconds, *, parameters="p", memory=1 << 20, forward=(1e-3,)):
    phases = {"forward": list(forward), "backward": [2e-3], "communication": [math.nan], "update": [4e-3]}
    return {"seconds": seconds, "phases": phases, "parameters": parameters, "resident_bytes": memory}


def test_the_slowest_rank_counts_and_turns_add_up():
    result = Result("x", 2, 10)
    result.add([answer([1.0, 4.0], memory=5), answer([3.0, 2.0], memory=9)])
    result.add([answer([5.0], memory=7), answer([5.0], memory=7)])
    assert result.seconds == [3.0, 4.0, 5.0]
    assert result.images_per_second == pytest.approx(2 * 10 / 4.0)
    assert result.resident_bytes == 9
    assert result.phases["forward"] == [1e-3, 1e-3]
    assert result.equal


def test_efficiency_and_ratio():
    alone, both = Result("x", 1, 10, [1.0]), Result("x", 2, 10, [1.25])
    for result in (alone, both):
        result.phases = answer([])["phases"]
    fields = both.line(alone, both).split()
    assert fields == ["x", "2", "1250.00", "16", "80.0%", "1.00", "1.00", "2.00", "-", "4.00", "0"]
    assert alone.line(alone, both).split()[4:6] == ["100.0%", "0.62"]
    assert both.line(None, both).split()[4] == "-"
    assert len(both.line(alone, both)) == len(train._HEADER.splitlines()[0]) == len(train._HEADER.splitlines()[1])


@pytest.mark.parametrize("words", ["--np 0", "--model resnet", "--batch-size -1", "--peers horovod", "--backend nccl"])
def test_wrong_arguments(words, capsys):
    assert cli.main(["bench", "train", *words.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_small_real_run(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert cli.main(f"bench train --batch-size 4 -n 3 -w 1 --turns 2 --apart --json {path}".split()) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert [line[:2] for line in lines] == [["distopt", "2"], ["distopt", "1"], ["apart", "2"]]
    assert lines[1][4] == "100.0%"
    assert lines[2][4] != "-"
    report = json.loads(path.read_text())
    assert report["missing"] == {}
    for row in report["rows"]:
        assert len(row["seconds"]) == 6
        assert row["equal"] is True
        assert row["resident_bytes"] > 1 << 20
        assert row["images_per_second"] == pytest.approx(4 * row["world_size"] / row["median_seconds"])
        assert all(seconds >= 0 for seconds in row["phases"].values())
        assert row["phases"]["forward"] > 0
        assert row["phases"]["backward"] > 0
        assert row["phases"]["update"] > 0


@pytest.mark.parametrize("fault", ["differ", "die"])
def test_a_fault_is_said_and_changes_the_exit_code(monkeypatch, capsys, fault):
    def take_turn(lineup, candidate, result, args):
        if fault == "die" and result.world_size == 2:
            lineup.drop(candidate, str(CrewError("a rank ended")))
            return
        ranks = range(result.world_size)
        result.add([answer([1.0], parameters="pq"[rank] if fault == "differ" else "p") for rank in ranks])

    monkeypatch.setattr(train, "_take_turn", take_turn)
    assert cli.main(["bench", "train", "--batch-size", "2", "--turns", "1"]) == 1
    out = capsys.readouterr().out
    assert ("# distopt: the ranks' parameters differ" if fault == "differ" else "# not measured: distopt x2") in out
    assert "\n distopt         1 " in out
