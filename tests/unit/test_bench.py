"""`python -m benchmarks all-reduce`, `train` and `kernels`: data that proves results, tables, small real runs."""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import all_reduce, distance, kernels
from benchmarks.__main__ import main
from benchmarks.all_reduce import Row, size_range
from benchmarks.networks.far import Link
from benchmarks.networks.site import ListedSite, Site
from benchmarks.options import byte_size
from benchmarks.peers import lineup
from benchmarks.peers.crew import Crew, rank_command
from benchmarks.peers.lineup import Candidate
from benchmarks.peers.ranks.libraries import COLLECTIVES
from benchmarks.peers.ranks.pattern import PERIOD, Pattern
from benchmarks.train import Result
from distopt import _core
from distopt.errors import UsageError
from tests.conformance.oracle import reduce_in_rank_order


# -- arguments ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("first", "last", "factor", "item", "sizes"),
    [(1000, 5000, 2, 8, [1000, 2000, 4000]), (6, 24, 2, 4, [4, 12, 24]), (3, 3, 2, 4, []), (8, 4, 2, 4, [])],
)
def test_size_range(first, last, factor, item, sizes):
    assert size_range(first, last, factor, item) == sizes


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("64", 64), ("2k", 2048), ("1.5M", 3 << 19), ("64KiB", 1 << 16), ("1GiB", 1 << 30)]
)
def test_a_size_in_bytes(text, n_bytes):
    assert byte_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "0", "0.3", "64iB", "64KB", "1T", "-1"])
def test_a_strange_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size in bytes"):
        byte_size(text)


# -- the data ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world_size", [2, 3, 16])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int8", "bool"])
def test_wrong_elements_are_counted(dtype, world_size):
    count = 2 * PERIOD + 1
    patterns = [Pattern(dtype, rank, world_size) for rank in range(world_size)]
    arrays = [np.zeros(count, "uint16" if dtype == "bfloat16" else dtype) for _ in range(world_size)]
    for pattern, array in zip(patterns, arrays, strict=True):
        pattern.fill(array)
    assert dtype == "bool" or not np.array_equal(arrays[0], arrays[1])
    total = reduce_in_rank_order(arrays, dtype, "sum")
    assert patterns[0].wrong(total) == 0
    total[[0, PERIOD - 1, PERIOD, count - 1]] = 0
    assert patterns[0].wrong(total) == 4
    assert dtype == "bool" or patterns[0].wrong(arrays[0]) > 0.9 * count
    if np.issubdtype(total.dtype, np.floating):
        total[5] = np.nan
        assert patterns[0].wrong(total) == 5


# -- hosts far apart ---------------------------------------------------------------------------------------------------
LINK = Link(round_trip=0.04, rate=1500 * 1e3)  # a million bytes of data and headers of each thousand packets


@pytest.mark.parametrize(
    ("n_hosts", "n_bytes", "seconds"),
    [
        (2, 1448, 0.021),  # a packet, and the delay
        (2, 1_448_000, 1.02),  # two hosts send each other the array
        (4, 1448, 0.023),  # three packets to three hosts at once
        (4, 1_448_000, 1.52),  # three quarters of it twice, without a pause
        (4, 28_960, 0.055),  # the delays of both phases, and the time to send three quarters
        (3, 1_448_000, 2 * 2 / 3 + 0.02),
    ],
)
def test_what_a_link_allows(n_hosts, n_bytes, seconds):
    assert distance.least_seconds(n_hosts, n_bytes, LINK) == pytest.approx(seconds)


def test_the_time_of_a_sum_begins_with_the_last_rank():
    ranks = [
        {"begins": [10.0, 20.0, 30.0], "seconds": [5.0, 5.0, 1.0]},
        {"begins": [12.0, 19.0, 30.5], "seconds": [3.5, 7.0, 1.0]},
    ]
    assert distance.seconds_of(ranks) == 3.5  # of 3.5, 6 and 1


def test_the_cells_of_a_candidate_that_failed_are_empty():
    found = {"Gloo": [0.3, 0.1, 0.2]}
    assert distance.cells(found, 0.05) == ["200", "", "50.0", "", ""]
    assert distance.cells({**found, "distopt": [0.1]}, 0.05) == ["200", "100", "50.0", "2.00", "2.00"]


@pytest.mark.parametrize("text", ["1", "9", "2,", "2,x", "-2"])
def test_a_strange_number_of_hosts_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="from 2 to 8"):
        distance.numbers_of_hosts(text)


# -- the table ---------------------------------------------------------------------------------------------------------
ROW = Row("shm", "wire", 4 << 20, 1 << 20, "float32", 4, [3e-3, 1e-3, 2e-3], 1, 0, "all_reduce")


def test_a_row_has_the_numbers_of_nccl_tests():
    assert ROW.time == 2e-3
    assert ROW.algorithm_bandwidth == pytest.approx((4 << 20) / 2e-3)
    assert ROW.bus_bandwidth == pytest.approx(ROW.algorithm_bandwidth * 1.5)


# -- all together ------------------------------------------------------------------------------------------------------
def bench(words, capsys):
    code = main(["all-reduce", *words.split()])
    return code, capsys.readouterr().out


def test_a_small_real_run(tmp_path, capsys):
    path = tmp_path / "out.json"
    code, out = bench(f"-b 1K -e 4k -n 4 --turns 2 --json {path}", capsys)
    assert code == 0
    report = json.loads(path.read_text())
    assert report["world_size"] == 2
    assert report["missing"] == {}
    assert report["machine"]["cores"] >= 1
    rows = report["rows"]
    expected = [("shm", "wire"), ("shm", "ordinary"), ("floor", "in place")]
    assert [(row["size_bytes"], row["who"], row["buffers"]) for row in rows] == [
        (size, *key) for size in (1024, 4096) for key in expected
    ]
    for row in rows:
        assert row["count"] * 4 == row["size_bytes"]
        assert len(row["seconds"]) == 4
        assert min(row["seconds"]) > 0
        assert row["wrong"] == 0
        assert sorted(row["seconds"])[1] <= row["median_seconds"] <= sorted(row["seconds"])[2]
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert len(lines) == len(rows)
    assert lines[0].split()[-1] == "1.00"


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "broadcast"])
def test_other_collectives(collective, tmp_path, capsys):
    pytest.importorskip("mpi4py")
    path = tmp_path / "out.json"
    words = f"--np 3 --collective {collective} --sizes 20000,100 -n 4 --turns 2 --transport shm,mpi --json {path}"
    code, out = bench(words, capsys)
    assert code == 0, out
    report = json.loads(path.read_text())
    split = collective != "broadcast"
    assert report["collective"] == collective
    assert [(row["size_bytes"], row["who"], row["buffers"]) for row in report["rows"]] == [
        (size, who, buffers)
        for size in ((96, 19_992) if split else (100, 20_000))
        for who in ("shm", "mpi")
        for buffers in ("wire", "ordinary")
    ]
    assert " over " in report["candidates"]["mpi"]


def test_hosts_files(tmp_path):
    def read(text):
        file = tmp_path / "hosts"
        file.write_text(text)
        site = ListedSite(file)
        return site.world_size, site.described, site.meeting()["meeting"].rpartition(":")[0]

    assert read("a:3\nb\n") == (4, " (3 on a, 1 on b)", "tcp://a")
    assert read("# x\n\nnode1 slots=2 # y\nnode2 slots = 8\n") == (10, " (2 on node1, 8 on node2)", "tcp://node1")
    with pytest.raises(UsageError, match=r"'a b' is neither HOST:RANKS nor HOST slots=RANKS"):
        read("a b\n")
    with pytest.raises(UsageError, match="lists 1 ranks; at least 2"):
        read("a\n")


def own_mpiexec():
    pytest.importorskip("mpi4py")
    path = Path(sys.executable).with_name("mpiexec")
    if not path.exists():
        pytest.skip("no mpiexec beside this Python")
    return [str(path), "-n", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["mpi", "torch"])
def test_the_ranks_of_peers(library):
    launcher = own_mpiexec() if library == "mpi" else []
    if library == "torch":
        pytest.importorskip("torch")
    with Crew("all_reduce", rank_command(), Site(2), launcher, lineup._as_root()) as crew:
        hello = crew.ask({"library": library, "group": "gloo", "folder": str(crew.folder)})
        assert [answer["rank"] for answer in hello] == [0, 1]
        request = {"count": 1000, "capacity": 2000, "dtype": "int32", "calls": 3, "samples": 2, "warm_up": 1}
        kinds = [(collective, buffers) for collective in COLLECTIVES for buffers in hello[0]["buffers"][collective]]
        assert len(kinds) == (9 if library == "mpi" else 4)
        for collective, buffers in kinds:
            for answer in crew.ask({**request, "collective": collective, "buffers": buffers}):
                assert answer["wrong"] == 0
                assert len(answer["seconds"]) == 2


@pytest.mark.slow
def test_wrong_sums_change_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(all_reduce, "_ask", lambda candidate, request: ([1e-3] * request["samples"], 5))
    code, out = bench("-b 1K -e 1K -n 1", capsys)
    assert code == 1
    assert {line.split()[-2] for line in out.splitlines() if not line.startswith("#")} == {"5"}


def test_the_slowest_rank_counts():
    answers = [{"seconds": [1.0, 4.0], "wrong": 2}, {"seconds": [3.0, 2.0], "wrong": 1}]
    crew = argparse.Namespace(ask=lambda request: answers)
    assert all_reduce._ask(Candidate("x", crew, {}), {}) == ([3.0, 4.0], 3)


# -- train -------------------------------------------------------------------------------------------------------------
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


@pytest.mark.slow
def test_a_small_training_run(tmp_path, capsys):
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


# -- kernels -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("isa", _core.supported_isas())
def test_a_small_run_of_kernels(tmp_path, capsys, isa):
    path = tmp_path / "out.json"
    assert main(f"kernels --count 5000 --ratio 0.01 -n 3 --isa {isa} --json {path}".split()) == 0
    report = json.loads(path.read_text())
    assert (report["count"], report["k"], report["isa"]) == (5000, 50, isa)
    assert all(len(row["seconds"]) == 3 for row in report["rows"])
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) == len(report["rows"])
    assert len({len(line) for line in [*lines, *kernels._HEADER.splitlines()]}) == 1
