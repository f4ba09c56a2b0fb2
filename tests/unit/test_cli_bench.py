"""`distopt bench all-reduce`: arguments, errors in one line, and small real runs."""

import argparse
import json
import sys

import numpy as np
import pytest

from distopt import cli, launch
from distopt.cli import bench
from distopt.errors import DistoptError
from distopt.launch.job.topology import Topology
from tests.processes import Program, mpiexec


@pytest.mark.parametrize(
    "words",
    ["-b 1X", "-b 8K -e 4K", "-f 1", "--np 0", "--np two", "-n 0", "--dtype float8", "--backend single", "--speed 9"],
)
def test_wrong_arguments_get_one_line_and_code_2(words, capsys):
    assert cli.main(["bench", "all-reduce", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_bench_needs_to_know_what(capsys):
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_requirement_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distopt.launch", None)
    monkeypatch.delattr("distopt.launch")
    assert cli.main(["bench", "all-reduce"]) == 1
    assert "distopt doctor" in capsys.readouterr().err
    assert cli.main(["doctor", "--help"]) == 0


def rows_of(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if not line.startswith(("#", "[rank"))]


def distopt(*words: str, env: dict[str, str] | None = None) -> str:
    ended = Program([sys.executable, "-m", "distopt", *words], env).end()
    assert ended.code == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64"])
def test_new_ranks_on_this_host(dtype, tmp_path):
    path = tmp_path / "out.json"
    out = distopt(*f"bench all-reduce --np 3 -b 999 -e 8K -n 3 -w 1 --dtype {dtype} --json {path}".split())
    item = bench._item_bytes(dtype)
    assert out.startswith("# 3 ranks on 1 host, ")
    assert "# not measured: mpi4py: " in out
    rows = rows_of(out)
    assert [(int(row[0]), row[2], row[4], row[5]) for row in rows] == [
        (size // item * item, dtype, "shm", buffers) for size in (999, 3996) for buffers in ("wire", "ordinary")
    ]
    assert {row[-2] for row in rows} == {"0"}
    report = json.loads(path.read_text())
    assert (report["benchmark"], report["world_size"], len(report["rows"])) == ("all-reduce", 3, 4)
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in report["rows"])


def test_the_ranks_of_mpiexec_beside_mpi():
    words = ["-m", "distopt", "bench", "all-reduce", "-b", "4K", "-e", "4K", "-n", "2", "--backend", "shm,mpi"]
    ended = mpiexec(2, *words)
    assert ended.code == 0, ended.stderr
    assert [(row[4], row[5]) for row in rows_of(ended.stdout)] == [
        *[(who, buffers) for who in ("shm", "mpi") for buffers in ("wire", "ordinary")],
        ("mpi4py", "in"),
    ]
    refused = mpiexec(2, *words, "--np", "2")
    assert refused.code == 2
    assert "--np 2 starts ranks, but " in refused.stderr


@pytest.mark.slow
def test_the_ranks_of_distopt_run():
    words = "run --nproc-per-node 2 -m distopt bench all-reduce -b 1K -e 1K -n 2"
    out = distopt(*words.split())
    assert [(row[4], row[5]) for row in rows_of(out)] == [("shm", "wire"), ("shm", "ordinary")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_wrong_elements_are_counted(dtype):
    """As rank 1 of 2, whose peer is played by the all-reduce."""
    lead = argparse.Namespace(topology=Topology.of_one_host(1, 2, "h"), barrier=lambda: None, xp=np, name="shm")
    peers: list[np.ndarray] = []

    def count_wrong(all_reduce):
        array = np.zeros(100, "uint16" if dtype == "bfloat16" else dtype)
        return bench._count_wrong(lead, bench._Candidate("x", "y", array, all_reduce), array, dtype)

    def plain(array):
        return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array

    def add(array, but=()):
        total = plain(array) + peers[0]
        total[list(but)] += 1
        array[...] = (total.view(np.uint32) >> 16) if dtype == "bfloat16" else total

    lead.topology = Topology.of_one_host(0, 2, "h")
    count_wrong(lambda array: peers.append(plain(array).copy()))
    lead.topology = Topology.of_one_host(1, 2, "h")
    assert count_wrong(add) == 0
    assert count_wrong(lambda array: add(array, (0, 7, 99))) == 3
    assert count_wrong(lambda array: None) == 100


def test_a_wrong_sum_fails(monkeypatch, capsys):
    monkeypatch.setattr(bench, "_count_wrong", lambda *_: 5)
    monkeypatch.setattr(launch, "join", lambda: launch.MultiprocessJob(launch.Ticket(), 0, 1))
    args = argparse.Namespace(backend=["auto"], sizes=[1024], dtype="float32", n=1, w=0, json=None)
    with pytest.raises(DistoptError, match="10 elements of the results are wrong"):
        bench._measure_all(args)
    assert [row[-2] for row in rows_of(capsys.readouterr().out)] == ["5", "5"]
