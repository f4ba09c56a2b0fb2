"""`python -m benchmarks all-reduce`, `train` and `kernels`: data that proves results, tables, small real runs."""

import argparse
import json
import re
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import all_reduce, distance, kernels
from benchmarks.__main__ import main
from benchmarks.networks.site import ListedSite, Site
from benchmarks.options import byte_size
from benchmarks.peers import lineup
from benchmarks.peers.crew import Crew, rank_command
from benchmarks.peers.ranks.libraries import COLLECTIVES
from benchmarks.peers.ranks.pattern import PERIOD, Pattern
from distopt import _core
from distopt.errors import UsageError
from tests.conformance.oracle import reduce_in_rank_order
from tests.processes import Program
from tests.unit.refusals import refused


@pytest.fixture
def bench(tmp_path, capsys):
    """`python -m benchmarks WORDS`: the report, the lines of the table, and the comments."""

    def run(words, code=0):
        path = tmp_path / "out.json"
        assert main([*words.split(), "--json", str(path)]) == code
        lines = capsys.readouterr().out.splitlines()
        table, about = ([line for line in lines if line.startswith("#") == starts] for starts in (False, True))
        return json.loads(path.read_text()), table, "\n".join(about)

    return run


def test_a_strange_size_or_number_of_hosts_is_refused():
    for text in ("", "0", "0.3", "1.5", "64iB", "64KB", "1T", "-1"):
        refused(argparse.ArgumentTypeError, "is not a size in bytes", byte_size, text)
    for text in ("1", "9", "2,", "2,x", "-2"):
        refused(argparse.ArgumentTypeError, "from 2 to 8", distance.numbers_of_hosts, text)


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


def kinds(report):
    return [(row["size_bytes"], row["who"], row["buffers"]) for row in report["rows"]]


def test_a_small_real_run(bench):
    report, lines, _ = bench("all-reduce -b 1K -e 4k -n 4 --turns 2")
    assert (report["world_size"], report["missing"]) == (2, {})
    assert report["machine"]["cores"] >= 1
    expected = [("shm", "wire"), ("shm", "ordinary"), ("floor", "in place")]
    assert kinds(report) == [(size, *key) for size in (1024, 4096) for key in expected]
    for row in report["rows"]:
        assert (row["count"] * 4, len(row["seconds"]), row["wrong"]) == (row["size_bytes"], 4, 0)
        assert min(row["seconds"]) > 0
        assert sorted(row["seconds"])[1] <= row["median_seconds"] <= sorted(row["seconds"])[2]
    assert len(lines) == len(report["rows"])
    assert lines[0].split()[-1] == "1.00"


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "broadcast"])
def test_other_collectives(collective, bench):
    pytest.importorskip("mpi4py")
    words = f"all-reduce --np 3 --collective {collective} --sizes 20000,100 -n 4 --turns 2 --transport shm,mpi"
    report, _, _ = bench(words)
    assert report["collective"] == collective
    sizes = (100, 20_000) if collective == "broadcast" else (96, 19_992)  # the others split them
    assert kinds(report) == [*product(sizes, ("shm", "mpi"), ("wire", "ordinary"))]
    assert " over " in report["candidates"]["mpi"]


def test_hosts_files(tmp_path):
    def read(text):
        file = tmp_path / "hosts"
        file.write_text(text)
        site = ListedSite(file)
        return site.world_size, site.described, site.meeting()["meeting"].rpartition(":")[0]

    assert read("a:3\nb\n") == (4, " (3 on a, 1 on b)", "tcp://a")
    assert read("# x\n\nnode1 slots=2 # y\nnode2 slots = 8\n") == (10, " (2 on node1, 8 on node2)", "tcp://node1")
    refused(UsageError, r"'a b' is neither HOST:RANKS nor HOST slots=RANKS", read, "a b\n")
    refused(UsageError, "lists 1 ranks; at least 2", read, "a\n")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["mpi", "torch"])
def test_the_ranks_of_peers(library):
    pytest.importorskip({"mpi": "mpi4py", "torch": "torch"}[library])
    path = Path(sys.executable).with_name("mpiexec")
    if library == "mpi" and not path.exists():
        pytest.skip("no mpiexec beside this Python")
    launcher = [str(path), "-n", "2"] if library == "mpi" else []
    with Crew("all_reduce", rank_command(), Site(2), launcher, lineup._as_root()) as crew:
        hello = crew.ask({"library": library, "group": "gloo", "folder": str(crew.folder)})
        assert [answer["rank"] for answer in hello] == [0, 1]
        request = {"count": 1000, "capacity": 2000, "dtype": "int32", "calls": 3, "samples": 2, "warm_up": 1}
        kinds = [(collective, buffers) for collective in COLLECTIVES for buffers in hello[0]["buffers"][collective]]
        assert len(kinds) == (9 if library == "mpi" else 4)
        for collective, buffers in kinds:
            for answer in crew.ask({**request, "collective": collective, "buffers": buffers}):
                assert (answer["wrong"], len(answer["seconds"])) == (0, 2)


@pytest.mark.parametrize("module", ["all_reduce", "kernels_torch", "libraries", "train", "train_torch"])
def test_the_ranks_of_peers_do_without_distopt(module):
    if module.endswith("_torch"):
        pytest.importorskip("torch")
    script = f"import sys; sys.modules['distopt'] = None; import benchmarks.peers.ranks.{module}"
    assert Program([sys.executable, "-c", script], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).end().code == 0


@pytest.mark.slow
def test_wrong_sums_change_the_exit_code(monkeypatch, bench):
    monkeypatch.setattr(all_reduce, "_ask", lambda candidate, request: ([1e-3] * request["samples"], 5))
    _, lines, _ = bench("all-reduce -b 1K -e 1K -n 1", code=1)
    assert {line.split()[-2] for line in lines} == {"5"}


@pytest.mark.slow
def test_a_small_training_run(bench):
    report, table, _ = bench("train --batch-size 4 -n 3 -w 1 --turns 2 --apart")
    lines = [line.split() for line in table]
    assert [line[:2] for line in lines] == [["distopt", "2"], ["distopt", "1"], ["apart", "2"]]
    assert lines[1][4] == "100.0%"
    assert lines[2][4] != "-"
    assert report["missing"] == {}
    for row in report["rows"]:
        assert (len(row["seconds"]), row["equal"]) == (6, True)
        assert row["resident_bytes"] > 1 << 20
        assert row["images_per_second"] == pytest.approx(4 * row["world_size"] / row["median_seconds"])
        assert all(seconds >= 0 for seconds in row["phases"].values())
        assert min(row["phases"][name] for name in ("forward", "backward", "update")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.usefixtures("peers_here")
def test_default_and_tuned_peers(number, bench):
    peers = ["torch-ddp", "torch-tuned", "torch-tuned-bf16"][-number:]
    report, _, comments = bench(f"train --batch-size 4 -n 2 -w 4 --turns 2 --peers {','.join(peers)}")
    about = dict(re.findall(r"^# (torch\S* x\d) +(.*)$", comments, re.M))
    for who in peers:
        for world_size in (1, 2):
            text = about[f"{who} x{world_size}"]
            assert ("tuned" in text, "bfloat16" in text) == ("tuned" in who, "bf16" in who)
            assert ("DistributedDataParallel" in text) == (world_size == 2)
    assert [row["who"] for row in report["rows"][::2]] == ["distopt", *peers]
    assert all(row["equal"] for row in report["rows"])


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


@pytest.mark.parametrize("isa", _core.supported_isas())
def test_a_small_run_of_kernels(bench, isa):
    report, lines, _ = bench(f"kernels --count 5000 --ratio 0.01 -n 3 --isa {isa}")
    assert (report["count"], report["k"], report["isa"]) == (5000, 50, isa)
    assert all(len(row["seconds"]) == 3 for row in report["rows"])
    assert len(lines) == len(report["rows"])
    assert len({len(line) for line in [*lines, *kernels._HEADER.splitlines()]}) == 1
