"""`distopt.init` and what a world computes, on ranks of every launcher and transport; what ranks that disagree say."""

import os
import re
import sys

import numpy as np
import pytest

import distopt
from distopt import launch, opt, tensor
from instruments.emulation import activate, build
from tests.conformance.ranks import run_ranks_ok
from tests.processes import ROOT, Ended, Program, mpiexec
from tests.ranks.world_script import CHECKS, SHAPES, calls, data

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

SCRIPT = str(ROOT / "tests" / "ranks" / "world_script.py")


def run(start: str, n: int, *how: str, transport: str = "auto") -> Ended:
    env = {"DISTOPT_TRANSPORT": transport}
    if start == "mpiexec":
        return mpiexec(n, SCRIPT, start, *how, env=env)
    return Program([sys.executable, SCRIPT, str(n) if start == "spawn" else start, *how], env).end()


STARTS = [
    ("alone", 1, "auto", "single"),
    ("spawn", 3, "auto", "shm"),
    ("mpiexec", 2, "auto", "shm"),
    ("mpiexec", 3, "mpi", "mpi"),
]


@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(("start", "n", "choice", "transport"), STARTS)
def test_every_method_agrees_with_numpy(start, n, choice, transport):
    ended = run(start, n, transport=choice)
    assert (ended.code, ended.stderr) == (0, "")
    told = sorted(re.sub(r"^\[rank \d\] ", "", line) for line in ended.stdout.splitlines())
    assert told == [f"{rank} {n} {rank} {rank == 0} {transport}: {len(CHECKS)} checks passed" for rank in range(n)]


@pytest.mark.parametrize("n", [1, 2])
def test_the_script_of_the_documentation_runs(n, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "collectives.md").read_text(), re.S)
    script = tmp_path / "script.py"
    script.write_text(code)
    ended = mpiexec(n, str(script)) if n > 1 else Program([sys.executable, str(script)]).end()
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[0] == f"epoch 0: accuracy {'0.900' if n == 1 else '0.905'}"
    assert len(ended.stdout.splitlines()) == (100 if n == 1 else 1)


def joined(job, ticket: launch.Ticket) -> str:
    place = ticket, job.topology.rank, job.topology.world_size
    with distopt.init(*place) as world:
        assert distopt.init(*place) is world
        return f"{world.communicator.name} {world.all_gather(world.rank).tolist()}"


@pytest.mark.parametrize("world_size", [1, 3])
def test_processes_that_a_script_starts_itself_pass_a_ticket(world_size):
    said = f"{'single' if world_size == 1 else 'shm'} {[*range(world_size)]}"
    assert run_ranks_ok(joined, world_size, launch.Ticket()) == [said] * world_size


# How the last rank and the others call a collective, in the words of either transport.
MISMATCHES = {
    "shape": tuple(rf"all_reduce #\d of 12 float32\W+sum\W+float32 \[{shape}\]" for shape in ("4, 3", "3, 4")),
    "type": tuple(rf"all_reduce #\d of 12 int32\W+max\W+{dtype} \[3, 4\]" for dtype in ("int8", "int16")),
    "number": (r"all_reduce #\d of 1 float64\W+sum\W+a float", r"all_reduce #\d of 2 int64\W+sum\W+an int"),
    "bool": (r"all_gather #\d of 1 int32\W+a bool", r"all_gather #\d of 1 int64\W+an int"),
    "op": tuple(rf"all_reduce #\d of 1 float64\W+{op}\W+a float" for op in ("max", "min")),
    "collective": (r"barrier #\d", r"all_gather #\d of 12 float32\W+float32 \[3, 4\]"),
    "root": tuple(rf"broadcast #\d of 12 float32 from rank {root}\W+float32 \[3, 4\]" for root in (1, 0)),
    "object's root": tuple(rf"broadcast #\d of 2 int64 from rank {root}\W+length of an object" for root in (1, 0)),
}


@pytest.mark.parametrize(("start", "transport"), [("spawn", "shm"), ("mpiexec", "mpi")])
def test_a_mismatch_names_both_calls_on_both_ranks(start, transport):
    ended = run(start, 2, *MISMATCHES, transport=transport)
    assert ended.code == 0, ended
    lines = [re.sub(r"^\[rank \d\] ", "", line) for line in ended.stdout.splitlines()]
    for how, texts in MISMATCHES.items():
        told = [line for line in lines if line.startswith(f"{how}, rank ")]
        assert len(told) == 2, ended
        for line in told:
            for rank, call in zip((1, 0), texts, strict=True):
                assert re.search(rf"rank {rank}( on \S+)? \([^)]*\) (is in|in|called) {call}", line), line


def on_a_gpu(job, ticket: launch.Ticket) -> str:
    activate()
    os.environ["DISTOPT_DEVICE"] = "cuda"
    import cupy

    rank, world_size = job.topology.rank, job.topology.world_size
    with distopt.init(ticket, rank, world_size) as world:
        for dtype in ("float32", "float16", "int8", "int32", "int64", "uint64", "bool"):
            for shape in SHAPES[1:]:
                inputs = [data(r, (2, *shape), dtype)[::2] for r in range(world_size)]
                array, host = cupy.asarray(data(rank, (2, *shape), dtype))[::2], inputs[rank]
                mean = world.all_reduce(host, "mean")  # takes the same way, through device memory
                for call, args, expected in (*calls(inputs), ("all_reduce", ("mean",), mean)):
                    result = getattr(world, call)(array, *args)
                    assert isinstance(result, cupy.ndarray)
                    assert result.dtype == expected.dtype
                    np.testing.assert_array_equal(result.get(), expected)
                np.testing.assert_array_equal(array.get(), host)
        optimizer = opt.DistOpt(opt.SGD(lr=0.1))
        assert optimizer.communicator is world.communicator
        own = tensor.from_numpy(data(rank, (3, 5), "float32"), optimizer.device)
        gathered = world.all_gather(own)
        assert type(gathered) is tensor.Tensor
        assert gathered.device is own.device
        np.testing.assert_array_equal(gathered.to_numpy(), [data(r, (3, 5), "float32") for r in range(world_size)])
        assert world.all_reduce(rank + 1) == world_size * (world_size + 1) // 2
        assert world.broadcast_object({"rank": rank}, world_size - 1) == {"rank": world_size - 1}
        world.barrier()
        return world.communicator.name


def test_arrays_of_emulated_gpus():
    build.build()
    assert run_ranks_ok(on_a_gpu, 2, launch.Ticket()) == ["nccl"] * 2
