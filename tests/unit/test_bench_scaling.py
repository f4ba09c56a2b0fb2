"""`python -m benchmarks scaling`: the fit, the network, the predictions, and what is said about their errors."""

from __future__ import annotations

import json
import math
import random

import pytest

from benchmarks.__main__ import main
from benchmarks.models.scaling import STRATEGIES, Curve, Line, Network, Training, fit, predict

SIZES = [1 << power for power in range(10, 28, 2)]
TRUE = Line(20e-6, 1 / 12e9)
SLOW = Line(50e-6, 8e-9)  # 1 Gbit/s
LOCAL = Curve(TRUE)


# -- the fit -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("true", [TRUE, Line(1e-6, 1 / 3e9), Line(0.3, 1e-12), Line(0.0, 1e-9)])
def test_a_line_is_found_again(true):
    found = fit([(size, true.time(size)) for size in SIZES]).line
    assert found.latency == pytest.approx(true.latency, rel=1e-6, abs=1e-12)
    assert found.seconds_per_byte == pytest.approx(true.seconds_per_byte, rel=1e-6)


def test_noise_moves_both_ends_alike():
    rng = random.Random(1)
    found = fit([(size, TRUE.time(size) * rng.uniform(0.9, 1.1)) for size in SIZES for _ in range(20)]).line
    assert found.latency == pytest.approx(TRUE.latency, rel=0.05)
    assert found.seconds_per_byte == pytest.approx(TRUE.seconds_per_byte, rel=0.05)


@pytest.mark.parametrize(
    "points",
    [
        [(4096, 1e-3)],
        [(1024, 1e-6), (4096, 9e-6)],  # the exact line begins below zero
        [(1024, 9e-6), (4096, 1e-6)],  # and this one falls
        [(1024, 1e-6), (1024, 3e-6)],
    ],
)
def test_no_term_is_negative(points):
    found = fit(points)
    assert found.line.latency >= 0
    assert found.line.seconds_per_byte >= 0
    assert all(0 < found.time(size) < 10 * seconds for size, seconds in points)


@pytest.mark.parametrize("knee", SIZES[2:-2])
def test_a_bend_is_found_again(knee):
    true = Curve(TRUE, knee, 1 / 2e9)
    found = fit([(size, true.time(size)) for size in SIZES])
    assert found.knee_bytes == knee
    assert found.slope == pytest.approx(true.slope)
    assert all(found.time(size) == pytest.approx(true.time(size)) for size in SIZES)


def test_a_bend_must_earn_its_place():
    rng = random.Random(2)
    for _ in range(20):
        assert fit([(size, TRUE.time(size) * rng.uniform(0.8, 1.25)) for size in SIZES]).knee_bytes is None


# -- the network -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("algorithm", "messages"), [("ring", 126), ("halving-doubling", 12)])
def test_the_all_reduce_of_64_hosts(algorithm, messages):
    seconds = Network(SLOW, algorithm).all_reduce(1e6, 64)
    assert seconds == pytest.approx(messages * 50e-6 + 2 * 63 / 64 * 1e6 * 8e-9)


@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling"])
def test_one_host_needs_no_network(algorithm):
    network = Network(SLOW, algorithm)
    assert network.all_reduce(1e9, 1) == network.sparse_all_reduce(10, 1000, 1) == 0


def test_the_sparse_sum_takes_the_way_with_the_fewest_bytes():
    network, count = Network(Line(0.0, 1.0), "ring"), 1_000_000
    assert network.sparse_all_reduce(1000, count, 2) == 8 * 1000
    split = network.sparse_all_reduce(1000, count, 4096)
    assert split == pytest.approx(4095 / 4096 * (8 * 1000 + 4 * count))
    assert network.sparse_all_reduce(900_000, count, 64) == network.all_reduce(4 * count, 64)


# -- predictions -------------------------------------------------------------------------------------------------------
TRAINING = Training(alone=10e-3, compute=11e-3, backward=6e-3, count=431_080, batch_size=64)


def step(ranks, strategy="fp32", *, local=LOCAL, per_host=2, line=SLOW):
    return predict(TRAINING, local, Network(line, "ring"), per_host, ranks, strategy, 0.01)


def test_one_host_is_the_fitted_line():
    found = step(2)
    assert (found.hosts, found.communication) == (1, pytest.approx(TRUE.time(4 * 431_080)))
    assert found.step == (pytest.approx(11e-3 + found.communication), 11e-3)
    assert found.efficiency == (pytest.approx(10e-3 / found.step[0]), pytest.approx(10 / 11))


def test_several_hosts_add_the_network():
    found = step(8)
    size = 4 * 431_080
    assert found.hosts == 4
    assert found.communication == pytest.approx(TRUE.time(size) + 6 * 50e-6 + 1.5 * size * 8e-9)
    assert found.step[1] == pytest.approx(11e-3 + found.communication - 6e-3)


def test_one_rank_a_host_has_nothing_local():
    found = step(2, local=None, per_host=1)
    assert found.hosts == 2
    assert found.communication == pytest.approx(2 * 50e-6 + 4 * 431_080 * 8e-9)
    assert found.step[0] == pytest.approx(10e-3 + found.communication)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_ranks_never_help_a_step(strategy):
    steps = [step(2**power, strategy).step for power in range(1, 11)]
    assert steps == sorted(steps)
    assert all(0 < seconds[1] <= seconds[0] for seconds in steps)


def test_half_the_bytes_take_half_the_time_on_a_slow_network():
    slow = Line(0.0, 1e-6)
    assert step(64, "fp16", line=slow).communication == pytest.approx(step(64, line=slow).communication / 2, rel=1e-3)


# -- the command -------------------------------------------------------------------------------------------------------
def table(path, world_size=2, who="shm"):
    rows = [
        {
            "who": who,
            "buffers": "wire",
            "world_size": world_size,
            "size_bytes": size,
            "median_seconds": TRUE.time(size) * (2 if size == SIZES[3] else 1),
        }
        for size in SIZES
    ]
    path.write_text(json.dumps({"benchmark": "all-reduce", "rows": rows}))
    return path


def training(path, world_sizes=(1, 2)):
    phases = {"forward": 3e-3, "backward": 6e-3, "communication": 1e-3, "update": 1e-3}
    rows = [
        {"who": "distopt", "world_size": n, "batch_size": 32, "median_seconds": 9e-3 + 1e-3 * n, "phases": phases}
        for n in world_sizes
    ]
    path.write_text(json.dumps({"benchmark": "train", "gradient_count": 431_080, "rows": rows}))
    return path


def bench(words, capsys):
    code = main(["scaling", *map(str, words)])
    return code, *capsys.readouterr()


def test_every_point_has_its_error(tmp_path, capsys):
    out = tmp_path / "m.json"
    files = [table(tmp_path / "a.json"), "--train", training(tmp_path / "t.json")]
    code, text, _ = bench([*files, "--json", out], capsys)
    assert code == 0
    report = json.loads(out.read_text())
    (found,) = report["fits"]
    sizes, _, errors = zip(*found["points"], strict=True)
    assert [*sizes] == SIZES
    line = Line(**found["curve"]["line"])
    for size, seconds, error in found["points"]:
        assert error == pytest.approx(line.time(size) / seconds - 1)
    assert min(errors) == errors[3] < -0.3
    assert [entry["ranks"] for entry in report["predictions"]] == [2**power for power in range(1, 11)] * 3
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(SIZES) + 30
    predicted = 10e-3 + line.time(4 * 431_080)
    assert f"measured 11.00 ms, predicted {predicted * 1e3:.2f} ms, error {predicted / 11e-3 - 1:+.0%}" in text


def test_a_step_can_be_given_by_hand(tmp_path, capsys):
    words = [table(tmp_path / "a.json"), "--step-ms", 100, "--backward-ms", 60, "--bytes", "100M", "--strategy", "fp32"]
    code, text, _ = bench([*words, "--gbit", 100], capsys)
    assert code == 0
    assert "26,214,400 gradients, 100.00 ms a step alone, 2 ranks a host" in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("a.json", 2, "--train FILE, or --step-ms and --bytes"),
        ("a.json --step-ms 5", 2, "--train FILE, or --step-ms and --bytes"),
        ("a.json --step-ms 5 --bytes 1M --backward-ms 6", 2, "longer than the step"),
        ("a.json --train t.json --who mpich", 2, "--who 'shm' --buffers 'wire'"),
        ("a.json --train t.json --per-host 8", 2, "they have 2"),
        ("a.json --train alone.json", 2, "steps of 1 and of 2 ranks"),
        ("a.json --train a.json", 1, "no measurements of train"),
        ("none.json --train t.json", 1, "cannot be read"),
        ("junk.json --train t.json", 1, "cannot be read"),
        ("list.json --train t.json", 1, "no measurements"),
        ("rows.json --train t.json", 1, "no measurements"),
        ("a.json --train t.json --gbit 0", 2, "not a positive number"),
        ("a.json --train t.json --latency-us nan", 2, "not a positive number"),
        ("", 2, "TABLE"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, monkeypatch, capsys, words, code, message):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "a.json")
    training(tmp_path / "t.json")
    training(tmp_path / "alone.json", world_sizes=(1,))
    (tmp_path / "junk.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "rows.json").write_text('{"benchmark": "all-reduce", "rows": [{"who": "shm"}]}')
    found, out, err = bench(words.split(), capsys)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert message in err


@pytest.mark.slow
def test_the_fit_of_what_bench_writes(tmp_path, capsys):
    path = tmp_path / "a.json"
    assert main(["all-reduce", "-b", "1K", "-e", "16K", "-n", "2", "--json", str(path)]) == 0
    code, text, _ = bench([path, "--step-ms", 10, "--bytes", "1M"], capsys)
    assert code == 0
    assert math.isfinite(float(text.splitlines()[-1].split()[3]))
