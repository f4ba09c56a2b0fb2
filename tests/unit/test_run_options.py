"""The command line of `distopt run`: torchrun's words, and one line for what is wrong."""

import os
import shlex
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from distopt import cli
from distopt.launch.agents.options import RunOptions

LOGS = Path("logs")
STATIC = {"nodes": 2, "host": "node0", "port": 29500, "static": True}


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """The options that a command line gives to the agent."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PMI_", "OMPI_"))]:
        monkeypatch.delenv(name)
    seen = []
    for module in ("agents.agent", "workers.supervisor"):
        monkeypatch.setattr(f"distopt.launch.{module}.run", lambda options: seen.append(options) or 0)

    def parse(line):
        assert cli.main(["run", *line.split()]) == 0
        return seen[-1]

    return parse


def options(words="train.py", **values):
    return RunOptions((sys.executable, *words.split()), **values)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", options()),
        ("--nproc-per-node 2 train.py --epochs 1 -m --nnodes 3", options("train.py --epochs 1 -m --nnodes 3", ranks=2)),
        ("--nproc_per_node=3 --max_restarts 2 train.py", options(ranks=3, restarts=2)),
        ("--standalone --nnodes=1:1 -m distopt.cli x", options("-m distopt.cli x")),
        (
            "--heal --nnodes 2:5 --nproc-per-node 1:4 --rdzv-endpoint a train.py",
            options(ranks=4, nodes=5, spare_ranks=3, spare_nodes=3, host="a", port=29400, heal=True),
        ),
        (
            "--heal --workers node --nnodes 1:8 --rdzv-endpoint a train.py",
            options(nodes=8, spare_nodes=7, host="a", port=29400, heal=True, workers="node"),
        ),
        (
            "--heal --alone --nnodes 3 --rdzv-endpoint a:1,b,[fe80::1]:29401 train.py",
            options(nodes=3, host="a", port=1, more_places=(("b", 29401), ("fe80::1", 29401)), heal=True, alone=True),
        ),
        ("--master-port 1234 --log-dir logs train.py", options(port=1234, log_dir=LOGS)),
        (
            "--log-dir logs -r 0:1,2:3 --tee 2 --local-ranks-filter 0,2 --role x --start-method spawn train.py",
            options(log_dir=LOGS, redirects={0: 1, 2: 3}, tee={-1: 2}, shown_ranks=frozenset({0, 2}), role="x"),
        ),
        (
            "--rdzv-conf join_timeout=30,read_timeout=5 --rdzv-timeout 9 --local-addr a --run-path train.py",
            options(timeout=30.0),
        ),
        ("--no-python sh -c true", RunOptions(("sh", "-c", "true"))),
        (
            "--nnodes 2 --rdzv-endpoint=node0:29411 --rdzv-id j7 --rdzv-backend c10d --rdzv-timeout 9 train.py",
            options(nodes=2, host="node0", port=29411, run_id="j7", timeout=9.0),
        ),
        (
            "--nnodes 2 --rdzv_endpoint [fe80::1] --node_rank 1 train.py",
            options(host="fe80::1", port=29400, nodes=2, node_rank=1),
        ),
        ("--nnodes 2 --node-rank 0 --master-addr node0 train.py", options(**STATIC, node_rank=0)),
        (
            "--nnodes 2 --node-rank 1 --rdzv-backend static --rdzv-endpoint node0 train.py",
            options(**STATIC, node_rank=1),
        ),
        ("--nproc-per-node cpu train.py", options(ranks=len(os.sched_getaffinity(0)))),
    ],
)
def test_options(parse, line, expected):
    assert parse(line) == expected


@pytest.mark.parametrize(
    ("line", "streams"),  # of local ranks 0 and 1: of stdout and stderr, whether shown, whether in files
    [
        ("train.py", [[(True, False)] * 2] * 2),
        ("--log-dir logs train.py", [[(True, True)] * 2] * 2),
        ("--log-dir logs -r 1 train.py", [[(False, True), (True, False)]] * 2),
        ("--log-dir logs -r 0:3 -t 1:2 train.py", [[(False, True)] * 2, [(True, False), (True, True)]]),
        ("--log-dir logs -r 3 -t 1 train.py", [[(True, True), (False, True)]] * 2),
        ("--local-ranks-filter 1 --log-dir logs train.py", [[(False, True)] * 2, [(True, True)] * 2]),
    ],
)
def test_where_output_goes(parse, line, streams):
    assert [parse(line).streams_of(local_rank) for local_rank in (0, 1)] == streams


def test_options_without_effect_are_named(parse, capsys):
    parse("--numa-binding node --rdzv-conf timeout=3,keep_alive_interval=5 train.py")
    words = ("--numa-binding", "keep_alive_interval of --rdzv-conf")
    said = [f"distopt run: {each} is torchrun's, and does nothing here" for each in words]
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "required: SCRIPT"),
        ("nowhere.py", "no script nowhere.py"),
        ("-r 4 train.py", "'4': 0 is nothing, 1 stdout"),
        ("--tee x:1 train.py", "'x' is not"),
        ("--no-python no-such-program", "no program no-such-program"),
        ("--no-python --heal sh", "--heal is for Python"),
        ("--heal --workers rank -r 3 train.py", "with --workers give --log-dir"),
        ("-m nowhere.at.all", "no module nowhere.at.all"),
        ("--nproc train.py", "unrecognized arguments: --nproc"),
        ("--nproc-per-node 0 train.py", "'0' is not a whole number of at least 1"),
        ("--nproc-per-node gpu train.py", "'gpu' is not counted here"),
        ("--nproc-per-node 1_0 train.py", "'1_0' is not a whole number"),
        ("--nnodes 1:4 --rdzv-endpoint a train.py", "a range of nodes or ranks needs --heal"),
        ("--workers rank train.py", "--workers needs --heal"),
        ("--heal --workers host train.py", "invalid choice: 'host'"),
        ("--nproc-per-node 1:2 --max-restarts 3 train.py", "a range of nodes or ranks needs --heal"),
        ("--nnodes 4:1 train.py", "'4:1' is no range; give the smaller number first"),
        ("--nnodes 1: train.py", "'' is not a whole number"),
        ("--nproc-per-node 0:2 train.py", "'0' is not a whole number of at least 1"),
        ("--heal --nnodes 1:2 train.py", "--nnodes 2 needs --rdzv-endpoint"),
        ("--heal --nnodes 1:2 --node-rank 0 --rdzv-endpoint a train.py", "leave --node-rank out"),
        ("--heal --nnodes 1:2 --node-rank 0 --master-addr a train.py", "leave --node-rank out"),
        ("--alone train.py", "--alone is for jobs that heal"),
        ("--nnodes 2 --rdzv-endpoint a,b train.py", "several hosts in --rdzv-endpoint need --heal"),
        ("--heal --nnodes 2 --rdzv-endpoint a,b,a train.py", "names a host twice"),
        ("--nnodes 2 train.py", "--nnodes 2 needs --rdzv-endpoint"),
        ("--nnodes 2 --standalone --rdzv-endpoint a train.py", "--standalone is for one node"),
        ("--nnodes 2 --rdzv-endpoint a:b train.py", "'b' is not a whole number"),
        ("--nnodes 2 --rdzv-endpoint a:70000 train.py", "'70000' is not a port"),
        ("--nnodes 2 --rdzv-endpoint a --master-addr b train.py", "give one of them"),
        ("--nnodes 2 --master-addr b train.py", "needs --node-rank"),
        ("--nnodes 2 --node-rank 2 --rdzv-endpoint a train.py", "numbered from 0"),
        ("--nnodes 2 --rdzv-endpoint tcp://a:1 train.py", "leave out tcp://; give HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint ::1:29400 train.py", "an IPv6 address needs brackets; give [::1]:29400\n"),
        ("--nnodes 2 --rdzv-endpoint fe80::1 train.py", "give [fe80::1] or [fe80::1]:PORT"),
        ("--nnodes 2 --rdzv-endpoint a:b:1 train.py", "'a:b' is neither the name of a host nor an address"),
        ("--nnodes 2 --rdzv-endpoint :29400 train.py", "'' is neither the name of a host nor an address"),
        ("--nnodes 2 --node-rank 0 --master-addr a:1 train.py", "'a:1' is neither *; give a host, its port by"),
        ("python train.py", "the ranks are Python processes already; leave out `python`"),
        (f"{shlex.quote(sys.executable)} train.py", f"leave out `{sys.executable}`"),
        ("train", "there is no script train; did you mean train.py?"),
        ("-m train.py", "train.py is a file; leave out -m"),
        (".", ". is a folder without a __main__.py"),
        ("-np 2 train.py", "the number of ranks is --nproc-per-node 2"),
        ("--rdzv-id a/b train.py", "'a/b' is not a name"),
        ("--rdzv-timeout -1 train.py", "'-1'"),
        ("--rdzv-timeout nan train.py", "'nan' is not a positive number"),
        ("--rdzv-conf join_timeout train.py", "'join_timeout' is no KEY=VALUE"),
        ("--rdzv-conf timeout=soon train.py", "'soon' is not a positive number"),
        ("--rdzv-backend etcd train.py", "invalid choice: 'etcd'"),
    ],
)
def test_wrong_lines_get_one_line_and_code_2(parse, capsys, line, text):
    assert cli.main(["run", *shlex.split(line)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert fnmatchcase(err, f"distopt run: *{text.replace('[', '[[]').replace('?', '[?]')}*"), err


@pytest.mark.parametrize(("nodes", "code"), [(1, 2), (2, 0), (3, 2)])
def test_copies_that_a_launcher_starts_are_the_nodes_of_one_job(parse, monkeypatch, capsys, nodes, code):
    task = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "WORLD_SIZE": "7"}
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "--nnodes", str(nodes), "--rdzv-endpoint", "node0", "train.py"]) == code
    assert ("srun has started 2 copies of distopt run" in capsys.readouterr().err) == (code == 2)
