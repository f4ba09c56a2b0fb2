"""`python -m benchmarks train`: samples, the table, the exit code, and a small real run."""

import json
import math
import re

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.train import Result


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


def test_a_small_real_run(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(f"train --batch-size 4 -n 3 -w 1 --turns 2 --apart --json {path}".split()) == 0
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


PEERS = ["torch-ddp", "torch-tuned", "torch-tuned-bf16"]


@pytest.mark.slow
@pytest.mark.parametrize("peers", [["torch-tuned-bf16"], pytest.param(PEERS, marks=pytest.mark.sweep)], ids=len)
@pytest.mark.usefixtures("peers_here")
def test_default_and_tuned_peers(peers, tmp_path, capsys):
    path = tmp_path / "out.json"
    command = f"train --batch-size 4 -n 2 -w 4 --turns 2 --peers {','.join(peers)} --json {path}"
    assert main(command.split()) == 0
    about = dict(re.findall(r"^# (torch\S* x\d) +(.*)$", capsys.readouterr().out, re.M))
    for who in peers:
        for world_size in (1, 2):
            text = about[f"{who} x{world_size}"]
            assert ("tuned" in text, "bfloat16" in text) == ("tuned" in who, "bf16" in who)
            assert ("DistributedDataParallel" in text) == (world_size == 2)
    rows = json.loads(path.read_text())["rows"]
    assert [row["who"] for row in rows[::2]] == ["distopt", *peers]
    assert all(row["equal"] for row in rows)


def test_tuned_torch_trains_the_same_model():
    train_torch = pytest.importorskip("benchmarks.peers.ranks.train_torch")

    def trained(*, tuned, bfloat16=False):
        trainer = train_torch.Trainer(0, 1, {"batch_size": 4, "tuned": tuned, "bfloat16": bfloat16})
        for _ in range(3):
            trainer.step()
        return np.frombuffer(trainer.parameters(), np.float32)

    default = trained(tuned=False)
    assert default.size == 431_080
    np.testing.assert_allclose(trained(tuned=True), default, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(trained(tuned=True, bfloat16=True), default, atol=1e-2)
