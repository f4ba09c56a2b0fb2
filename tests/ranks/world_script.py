"""A rank of a world that checks every method against NumPy, or ends as the second argument says.

python world_script.py alone|mpiexec|N [how]: N is a number of ranks to spawn.
"""

import sys
from functools import reduce

import numpy as np
import pytest

import distopt
from distopt import launch, opt, tensor
from distopt.errors import CommunicatorClosedError, MismatchError, UsageError
from tests.unit.refusals import refused

SHAPES = [(), (1,), (0,), (0, 3), (7,), (3, 5), (2, 3, 11), (1031,), (257, 129)]
FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
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


def same(result, expected) -> None:
    assert type(result) is np.ndarray
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    if result.dtype == np.longdouble:  # which has bytes without meaning
        np.testing.assert_array_equal(result, expected)
    else:
        assert result.tobytes() == expected.tobytes()


def calls(inputs):
    """Names and arguments of collectives, and their results by NumPy."""
    yield "broadcast", (len(inputs) - 1,), inputs[-1]
    yield "all_gather", (), np.stack(inputs)
    if inputs[0].dtype.kind in "biuf":
        yield "all_reduce", ("max",), np.max(inputs, 0)
        yield "all_reduce", ("min",), np.min(inputs, 0)


# -- checks ----------------------------------------------------------------------------------------------------------
def every_dtype(world) -> None:
    ranks = range(world.world_size)
    for dtype in ["bool", *INTEGERS, *FLOATS]:
        for shape in SHAPES:
            inputs = [data(rank, shape, dtype) for rank in ranks]
            mine, before = inputs[world.rank], inputs[world.rank].copy()
            total = np.sum([x.astype(np.int64) for x in inputs], 0) if dtype not in FLOATS else reduce(np.add, inputs)
            mean = total / np.float64(world.world_size)
            if dtype in FLOATS:
                wide = reduce(np.add, [x.astype(np.float64) for x in inputs]) / world.world_size
                mean = wide.astype(dtype)
            same(world.all_reduce(mine), total.astype(np.int64 if dtype == "bool" else dtype).reshape(shape))
            np.testing.assert_allclose(world.all_reduce(mine, "mean"), mean, rtol=1e-3 if dtype == "float16" else 1e-7)
            assert world.all_reduce(mine, "mean").dtype == (dtype if dtype in FLOATS else np.float64)
            same(world.all_reduce(mine, "max"), reduce(np.maximum, inputs).reshape(shape))
            same(world.all_reduce(mine, "min"), np.asarray(reduce(np.minimum, inputs)))
            same(mine, before)


def every_type_is_carried(world) -> None:
    ranks = range(world.world_size)
    for dtype in ["bool", *INTEGERS, *FLOATS, *OTHERS]:
        for shape in SHAPES:
            inputs = [data(rank, shape, dtype) for rank in ranks]
            for root in ranks:
                same(world.broadcast(inputs[world.rank], root), inputs[root])
            same(world.all_gather(inputs[world.rank]), np.stack(inputs))


def every_layout(world) -> None:
    for dtype in ["float32", "float64", "int64", "uint16", "float16", "bool", "complex64", "U2"]:
        for shape in [(), (5,), (3, 4), (2, 3, 7)]:
            inputs = [data(rank, shape, dtype) for rank in range(world.world_size)]
            # Ranks need not have the same layout.
            ways = list(layouts(inputs[world.rank]).items())
            for turn in range(len(ways)):
                name, array = ways[(turn + world.rank) % len(ways)]
                before = array.tobytes()
                for call, args, expected in calls(inputs):
                    result = getattr(world, call)(array, *args)
                    assert result.dtype == array.dtype, (name, call)
                    assert result.flags.writeable
                    np.testing.assert_array_equal(result, expected, err_msg=f"{name} {call}")
                    if result.size:
                        result[...] = np.zeros(1, result.dtype)[0]  # a result's memory is not shared
                assert array.tobytes() == before, name


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
        same(world.all_gather(of_rank(rank)), np.array([of_rank(r) for r in range(n)], dtype))
        for root in range(n):
            result = world.broadcast(of_rank(rank), root)
            assert type(result) is type(of_rank(rank))
            assert result == of_rank(root)


def integer_sums_are_exact_or_an_error(world) -> None:
    n = world.world_size
    for dtype in INTEGERS:
        info = np.iinfo(dtype)
        # As large as fits, at both ends, and with carries between the halves of 64 bits.
        large, small = int(info.max) // n, -(-int(info.min) // n)
        odd = [large - 3 * world.rank, small + 5 * world.rank, 1 + world.rank, info.max if world.rank == 0 else 0]
        mine = np.array(odd, dtype)
        others = [[large - 3 * r, small + 5 * r, 1 + r, int(info.max) if r == 0 else 0] for r in range(n)]
        assert world.all_reduce(mine).tolist() == np.sum(np.array(others, object), 0).tolist()
        for extreme in {int(info.max), int(info.min)} - {0}:
            full = np.array([0, extreme], dtype)
            if n == 1:
                same(world.all_reduce(full), full)
            else:
                refused(UsageError, f"does not fit in {dtype}; convert to a wider type", world.all_reduce, full)
    if n > 1:
        refused(UsageError, "does not fit in int64", world.all_reduce, 2**63 - 1)


def tensors(world) -> None:
    for shape, dtype in (((3, 5), "float32"), ((2, 3), "int64"), ((), "float16")):
        inputs = [data(rank, shape, dtype) for rank in range(world.world_size)]
        own = tensor.Tensor.of(inputs[world.rank].copy())
        for call, args, expected in calls(inputs):
            result = getattr(world, call)(own, *args)
            assert type(result) is tensor.Tensor
            assert result.device is own.device
            same(result.array, expected)
            assert result.array.flags.writeable
        same(own.array, inputs[world.rank])


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
            total = world.all_reduce(inputs[world.rank])  # see `every_dtype`
            for call, args, expected in (*calls(inputs), ("all_reduce", (), total)):
                result = getattr(world, call)(Foreign(inputs[world.rank]), *args)
                assert type(result) is Foreign
                same(result.values, expected)


def objects(world) -> None:
    rng = np.random.default_rng(5)
    obj = {
        "stop": True,
        "best": (0.1 + world.rank * 0, -0.0, float("inf"), 2**200, -1, None),
        3: [b"", b"\0\xff", "\ud83d\ude00 \n", []],
        (1, "a"): {"weights": rng.standard_normal((3, 5)), "Fortran": np.asfortranarray(rng.integers(0, 9, (4, 3)))},
        b"key": [np.float32(0.1), np.int64(-3), np.bool_(True), np.array(2.5), np.zeros((0, 2), np.uint8)],
        None: np.array([(1, 0.5)], "i4,f8"),
    }
    for root in range(world.world_size):
        got = world.broadcast_object(obj if world.rank == root else object(), root)
        assert repr(got) == repr(obj)
        assert got is not obj
        assert [type(value) for value in got[b"key"]] == [type(value) for value in obj[b"key"]]
        same(got[(1, "a")]["weights"], obj[(1, "a")]["weights"])
        assert got[(1, "a")]["Fortran"].flags.f_contiguous
        large = world.broadcast_object(np.arange(300_001) * root if world.rank == root else None, root)
        same(large, np.arange(300_001) * root)
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


CHECKS = [every_dtype, every_type_is_carried, every_layout, numbers, integer_sums_are_exact_or_an_error, tensors]
CHECKS += [other_libraries, objects, what_root_cannot_send_is_an_error_on_all_ranks, refused_before_anything_is_sent]


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


# -- ranks that disagree or fail ---------------------------------------------------------------------------------------
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


def fail(how: str) -> None:
    with distopt.init() as world:
        world.barrier()
        if world.rank == world.world_size - 1:
            if how == "raise":
                raise ValueError("the cause")
            if how == "usage":
                world.all_reduce([1.0])
            sys.exit(3)
        world.all_reduce(world.rank)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # one write: whole lines
    sys.stdout.flush()


def main(*how: str) -> None:
    if not how:
        check()
    elif how[0] in ("raise", "usage", "exit"):
        fail(how[0])
    else:
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
