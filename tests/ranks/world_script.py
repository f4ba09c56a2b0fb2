"""A rank of a world that checks every method against NumPy, or calls something else than the others.

python world_script.py alone|mpiexec|N [how]: N is a number of ranks to spawn.
"""

import sys
from itertools import count, product

import numpy as np
import pytest

import distopt
from distopt import launch, opt, tensor
from distopt.errors import CommunicatorClosedError, MismatchError, UsageError
from tests.unit.refusals import refused

SHAPES = [(), (1,), (0,), (0, 3), (7,), (3, 5), (2, 3, 11), (1031,), (257, 129)]
FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMBERS = ["bool", *INTEGERS, *FLOATS]
OTHERS = ["complex64", "complex128", "longdouble", "U3", "S5", "datetime64[s]", "i1,f8", "V3"]


def data(rank: int, shape, dtype: str) -> np.ndarray:
    """Depends on rank and index. Sums of a few ranks fit in 8 bits, and are exact in float16."""
    values = (np.arange(np.prod(shape, dtype=int)) * (2 * rank + 3) + 5 * rank) % 29
    if dtype in FLOATS or np.dtype(dtype).kind == "i":
        values = values - 14
    values = values / 4 if dtype in FLOATS else values
    if dtype == "bool":
        return (values % 3 == 0).reshape(shape)
    if dtype == "i1,f8":
        made = np.zeros(len(values), dtype)
        made["f0"], made["f1"] = values, values / 8
        return made.reshape(shape)
    if np.dtype(dtype).kind in "SUV":
        return np.array([f"{value}" for value in values], "S3").astype(dtype).reshape(shape)
    return values.astype(dtype).reshape(shape)


def layouts(array: np.ndarray) -> dict[str, np.ndarray]:
    """The same values, lying in memory in every way."""
    apart = np.zeros(tuple(2 * n for n in array.shape), array.dtype)
    strided = apart[(..., *[slice(None, None, 2)] * array.ndim)]
    strided[...] = array
    backward = (..., *[slice(None, None, -1)] * array.ndim)
    backwards = np.array(array[backward])[backward]
    unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    fixed = array.copy()
    fixed.flags.writeable = False
    swapped = array.astype(array.dtype.newbyteorder("S"))
    ways = {"plain": array, "Fortran": np.array(array, order="F"), "strided": strided, "backwards": backwards}
    return {**ways, "unaligned": unaligned, "read-only": fixed, "swapped": swapped}


def calls(inputs):
    """Names and arguments of collectives, and their results by NumPy; all sums are exact."""
    for root, array in enumerate(inputs):
        yield "broadcast", (root,), array
    yield "all_gather", (), np.stack(inputs)
    if inputs[0].dtype.name in NUMBERS:
        wide = np.int64 if inputs[0].dtype == bool else inputs[0].dtype
        yield "all_reduce", (), np.sum(inputs, 0, dtype=wide)
        yield "all_reduce", ("max",), np.max(inputs, 0)
        yield "all_reduce", ("min",), np.min(inputs, 0)


# -- checks ----------------------------------------------------------------------------------------------------------
def every_type_and_layout(world) -> None:
    """Ranks need not have the same layout."""
    turns = count(world.rank)
    for dtype, shape in product([*NUMBERS, *OTHERS], SHAPES):
        inputs = [data(rank, shape, dtype) for rank in range(world.world_size)]
        ways = list(layouts(inputs[world.rank]).items())
        for call, args, expected in calls(inputs):
            name, array = ways[next(turns) % len(ways)]
            before = array.tobytes()
            result = getattr(world, call)(array, *args)
            assert (type(result), result.shape) == (np.ndarray, expected.shape), (name, call)
            assert result.dtype == (array.dtype if expected.dtype == inputs[0].dtype else expected.dtype), (name, call)
            np.testing.assert_array_equal(result, expected, err_msg=f"{name} {call}")
            if result.size:
                result[...] = np.zeros(1, result.dtype)[0]  # a result's memory is not shared
            assert array.tobytes() == before, name


def means(world) -> None:
    for dtype, shape in product(NUMBERS, SHAPES):
        inputs = [data(rank, shape, dtype) for rank in range(world.world_size)]
        mean = np.mean(np.array(inputs, np.float64), 0)
        result = world.all_reduce(inputs[world.rank], "mean")
        assert result.dtype == (dtype if dtype in FLOATS else np.float64)
        np.testing.assert_allclose(result, mean, rtol={"float16": 1e-3, "float32": 1e-6}.get(dtype, 1e-15))


def numbers(world) -> None:
    rank, n = world.rank, world.world_size
    cases = [
        (rank + 1, "sum", n * (n + 1) // 2),
        (rank + 1, "mean", (n + 1) / 2),
        (-rank, "min", 1 - n),
        (np.int16(rank), "max", n - 1),
        (np.uint8(250), "sum", 250 * n),
        (2**62 // n + rank, "sum", sum(2**62 // n + r for r in range(n))),
        (-(2**63) if rank == 0 else 2**63 - 1, "max", 2**63 - 1 if n > 1 else -(2**63)),
        (rank / 4, "sum", sum(r / 4 for r in range(n))),
        (np.float32(rank / 4), "max", (n - 1) / 4),
        (np.float16(0.5), "mean", 0.5),
        (float("inf") if rank == 0 else 1.0, "max", float("inf")),
        (rank == 0, "max", True),
        (np.bool_(rank == 0), "min", n == 1),
        (True, "sum", n),
        (rank == 0, "mean", 1 / n),
    ]
    for value, op, expected in cases:
        result = world.all_reduce(value, op)
        assert type(result) is type(expected), (value, op)
        assert result == pytest.approx(expected, rel=1e-15), (value, op)
    assert np.isnan(world.all_reduce(np.nan if rank == n - 1 else 1.0))
    for of_rank, dtype in ((lambda r: r * 3, "int64"), (lambda r: r / 3, "float64"), (lambda r: r % 2 == 0, "bool")):
        expected = np.array([of_rank(r) for r in range(n)], dtype)
        np.testing.assert_array_equal(world.all_gather(of_rank(rank)), expected, strict=True)
        for root in range(n):
            result = world.broadcast(of_rank(rank), root)
            assert type(result) is type(of_rank(rank))
            assert result == of_rank(root)


def integer_sums_that_do_not_fit(world) -> None:
    for dtype in INTEGERS if world.world_size > 1 else ():
        for extreme in {int(np.iinfo(dtype).max), int(np.iinfo(dtype).min)} - {0}:
            array = np.array([0, extreme], dtype)
            refused(UsageError, f"does not fit in {dtype}; convert to a wider type", world.all_reduce, array)


class Foreign:
    """An array of a library that is known by DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self.values, self.__dlpack__, self.__dlpack_device__ = array, array.__dlpack__, array.__dlpack_device__


def from_dlpack(array) -> Foreign:  # by which this module is a library
    return Foreign(np.from_dlpack(array))


def other_libraries(world) -> None:
    for dtype in ("float32", "float64", "float16", "int8", "int64", "uint8", "bool"):
        for cut in (lambda array: array, lambda array: array.T[::2], lambda array: array[1:2, 0].reshape(())):
            inputs = [cut(data(rank, (3, 5), dtype)) for rank in range(world.world_size)]
            for own, values in ((Foreign(inputs[world.rank]), "values"), (of_tensor(inputs[world.rank]), "array")):
                for call, args, expected in calls(inputs):
                    result = getattr(world, call)(own, *args)
                    assert type(result) is type(own)
                    np.testing.assert_array_equal(getattr(result, values), expected, strict=True)
                np.testing.assert_array_equal(getattr(own, values), inputs[world.rank])


def of_tensor(array: np.ndarray) -> tensor.Tensor:
    return tensor.Tensor.of(array.copy())


def objects(world) -> None:
    rng = np.random.default_rng(5)
    obj = {
        "best": (0.1, -0.0, float("inf"), 2**200, True, None),
        (1, "a"): {"weights": rng.standard_normal((3, 5)), "Fortran": np.asfortranarray(rng.integers(0, 9, (4, 3)))},
        b"key": [b"\0\xff", "\ud83d\ude00 \n", np.float32(0.1), np.array(2.5), np.zeros((0, 2), np.uint8)],
    }
    for root in range(world.world_size):
        got = world.broadcast_object(obj if world.rank == root else object(), root)
        assert repr(got) == repr(obj)
        assert got is not obj
        assert [type(value) for value in got[b"key"]] == [type(value) for value in obj[b"key"]]
        np.testing.assert_array_equal(got[(1, "a")]["weights"], obj[(1, "a")]["weights"], strict=True)
        assert got[(1, "a")]["Fortran"].flags.f_contiguous
        large = world.broadcast_object(np.arange(300_001) * root if world.rank == root else None, root)
        np.testing.assert_array_equal(large, np.arange(300_001) * root, strict=True)
    assert world.broadcast_object() is None


def what_root_cannot_send_is_an_error_on_all_ranks(world) -> None:
    last = world.world_size - 1
    wrong = {"a": [1, {"b": {2}}]} if world.rank == last else None
    text = rf"on rank {last}: obj\['a'\]\[1\]\['b'\] is a set, which is not sent; convert"
    refused(UsageError, text, world.broadcast_object, wrong, last)
    assert world.all_reduce(1) == world.world_size  # the ranks are in step


def refused_before_anything_is_sent(world) -> None:
    for wrong in ([1, 2], None, "text", object(), 1j, np.array([None]), 2**63, np.ma.masked_array([1])):
        for collective in (world.all_reduce, world.broadcast, world.all_gather):
            if world.rank == world.world_size - 1:
                refused(UsageError, "", collective, wrong)
    if world.rank == 0:
        for call, wrong in (
            (world.all_reduce, "avg"),
            (world.broadcast, world.world_size),
            (world.broadcast_object, -1),
        ):
            refused(UsageError, "", call, 1, wrong)
    assert world.all_reduce(1) == world.world_size


CHECKS = [every_type_and_layout, means, numbers, integer_sums_that_do_not_fit, other_libraries, objects]
CHECKS += [what_root_cannot_send_is_an_error_on_all_ranks, refused_before_anything_is_sent]


def check() -> None:
    before = opt.DistOpt(opt.SGD(lr=0.1)).communicator  # the world shares it
    with distopt.init() as world:
        assert distopt.init() is world
        assert before is world.communicator
        for body in CHECKS:
            body(world)
        assert world.closed is False
        name = world.communicator.name
    text = r"has closed its world; call distopt.init\(\) again"
    refused(CommunicatorClosedError, text, world.all_reduce, 1)
    with distopt.init() as again:
        assert again is not world
        assert again.all_reduce(1) == world.world_size
    before.barrier()
    say(f"{world.rank} {world.world_size} {world.local_rank} {world.is_main} {name}: {len(CHECKS)} checks passed")


# -- ranks that disagree ---------------------------------------------------------------------------------------------
def disagree(how: str) -> None:
    """The last rank does something else, in a world of its own."""
    world = distopt.init()
    odd = world.rank == world.world_size - 1
    array = np.zeros((3, 4), np.float32)
    calls = {
        "shape": lambda: world.all_reduce(array.T if odd else array),
        "type": lambda: world.all_reduce(array.astype(np.int8) if odd else array.astype(np.int16), "max"),
        "number": lambda: world.all_reduce(1.0 if odd else 1),
        "bool": lambda: world.all_gather(True if odd else 1),
        "op": lambda: world.all_reduce(2.5, "max" if odd else "min"),
        "collective": lambda: world.barrier() if odd else world.all_gather(array),
        "root": lambda: world.broadcast(array, int(odd)),
        "object's root": lambda: world.broadcast_object(1, int(odd)),
    }
    try:
        calls[how]()
    except MismatchError as error:
        say(f"{how}, rank {world.rank}: {error}")
    world.close()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # one write: whole lines
    sys.stdout.flush()


def main(*how: str) -> None:
    if not how:
        check()
    for each in how:
        disagree(each)


def spawned(rank: int, world_size: int, *how: str) -> None:
    main(*how)


if __name__ == "__main__":
    start, how = sys.argv[1], tuple(sys.argv[2:])
    if start.isdigit():
        launch.main(spawned, int(start), how)
    else:
        launch.main(main, args=how)
