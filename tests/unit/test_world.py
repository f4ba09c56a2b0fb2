"""`distopt.init` in one process, what a world takes and gives, exact integer sums, and data as bytes."""

import json
import re
import subprocess
import sys
from decimal import Decimal
from importlib.metadata import version

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import distopt
from distopt import launch, opt, tensor
from distopt.comm.objects import packed, unpacked
from distopt.comm.values import reducible, take
from distopt.comm.world import current
from distopt.errors import CommunicatorClosedError, UsageError
from tests.unit.refusals import refused

FORKS = """
import os, distopt
from distopt import launch
world = distopt.init(launch.Ticket(), 0, 1)
pid = os.fork()
if pid == 0:
    with distopt.init(launch.Ticket(), 0, 1) as own:
        os._exit(0 if own is not world and own.all_reduce(2) == 2 else 1)
print(os.waitpid(pid, 0)[1], world.all_reduce(4))
"""
NO_ARRAY = "a list is neither a number nor an array; convert it with numpy.asarray, or send it as it is with bro"
MASKED, LOSES = np.ma.masked_array([1.0, 2.0], [True, False]), "a masked array would lose its mask; pass array.filled"

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)
DATA = st.recursive(
    SCALARS | arrays_of.arrays(arrays_of.scalar_dtypes(), arrays_of.array_shapes(min_dims=0, min_side=0)),
    lambda parts: st.lists(parts) | st.tuples(parts, parts) | st.dictionaries(KEYS, parts),
    max_leaves=12,
)
NOT_SENT = "obj is a set, which is not sent; convert it to None, bool, int, float, str, bytes, list, tuple, dict "
OVERLAPPING = {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0]}


@pytest.fixture
def world():
    made = distopt.init(launch.Ticket(), 0, 1)
    yield made
    made.close()


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_package_loads_nothing_heavy_and_has_a_version():
    loaded = json.loads(run("import sys, distopt; distopt.__version__; import json; print(json.dumps([*sys.modules]))"))
    assert "distopt" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {"numpy", "mpi4py", "cupy", "safetensors", "torch"}
    assert not [name for name in loaded if name.startswith("distopt.")]
    assert distopt.__version__ == version("distopt-train")
    refused(AttributeError, "no attribute 'no_such_name'", getattr, distopt, "no_such_name")


def test_init_returns_the_open_world_and_after_close_or_a_fork_a_new_one(world):
    assert distopt.init() is world
    assert current() is world
    error = r"has an open World\(rank 0 of 1.*; close it before it joins another job"
    refused(UsageError, error, distopt.init, launch.Ticket(), 0, 1)
    world.close()
    world.close()
    assert current() is None
    for method in ("all_reduce", "broadcast", "all_gather", "broadcast_object"):
        error = r"rank 0 has closed its world; call distopt.init\(\) again"
        refused(CommunicatorClosedError, error, getattr(world, method), 1)
    refused(CommunicatorClosedError, "has closed its world", world.barrier)
    with distopt.init(launch.Ticket(), 0, 1) as again:
        assert again is not world
        assert again.all_reduce(3) == 3
    assert again.closed
    assert run(FORKS) == "0 4\n"


def test_attributes_and_an_exception_that_leaves_the_world_open(world):
    assert (world.rank, world.world_size, world.local_rank, world.local_size, world.is_main) == (0, 1, 0, 1, True)
    (host,) = world.hosts
    assert repr(world) == f"World(rank 0 of 1, local rank 0 of 1 on {host}, single)"
    with pytest.raises(KeyError), world:
        raise KeyError
    assert not world.closed
    with world:
        pass
    assert world.closed
    assert repr(world) == f"World(rank 0 of 1, local rank 0 of 1 on {host}, single, closed)"


def test_an_optimizer_uses_the_world_unless_told_otherwise(world):
    assert opt.DistOpt(opt.SGD()).communicator is world.communicator
    ticket = launch.Ticket()
    job = launch.MultiprocessJob(ticket, 0, 1)
    for arguments in ({"job": job}, {"nccl_id": ticket, "local_rank": 0, "world_size": 1}):
        assert opt.DistOpt(opt.SGD(), **arguments).communicator is not world.communicator
    world.close()
    assert opt.DistOpt(opt.SGD(), ticket, 0, 1).communicator is not world.communicator


def test_a_world_uses_the_communicator_of_the_optimizer_that_was_there_first(monkeypatch):
    for name in ("_offers", "_worlds"):  # those of other tests, which the garbage collector may not have found yet
        monkeypatch.setattr(f"distopt.comm.world.{name}", {})
    first, second = opt.DistOpt(opt.SGD()), opt.DistOpt(opt.SGD())
    with distopt.init() as world:
        assert world.communicator is first.communicator is not second.communicator
    assert not first.communicator.closed
    first.communicator.close()
    with distopt.init() as world:
        assert world.communicator is not first.communicator


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], NO_ARRAY),
        *[(x, f"a {type(x).__name__} is neither") for x in ((1.0,), None, "text", 1j, Decimal(1), np.str_("a"))],
        *[(x, f"a {type(x).__name__} is neither") for x in (np.complex64(1), np.timedelta64(1, "s"))],
        (MASKED, f"{LOSES}(0), say, and"),
        (2**63, "an int of 64 bits does not fit in int64; pass it as a float"),
        (np.array([None]), "an array of type object holds no plain data; convert it with array.astype"),
        (np.zeros(3, "V0"), "holds no plain data"),
    ],
    ids=range(13),
)
def test_what_cannot_be_sent_is_refused_in_one_line(world, collective, value, message):
    refused(UsageError, re.escape(message), getattr(world, collective), value)


def test_numbers_longer_than_a_float_keep_their_bits_or_are_refused(world):
    big = np.longdouble("1e4000")
    if not np.isfinite(big):
        pytest.skip("long doubles are doubles here")
    refused(UsageError, "float128 cannot be reduced; convert it to float16, float32, float64", world.all_reduce, big)
    for found in (world.broadcast(big), world.all_gather(big)[0], world.broadcast_object(big)):
        assert (type(found), found) == (np.longdouble, big)


def test_masked_arrays_and_those_on_another_device_are_refused(world):
    for call in (
        world.broadcast_object,
        world.communicator.all_reduce,
        tensor.from_numpy,
        lambda array: tensor.Tensor(data=array),
        tensor.Tensor((2,)).copy_from_numpy,
        lambda array: tensor.Tensor((2,)) + array,
    ):
        refused(UsageError, rf"{LOSES}\(0\), say, and", call, MASKED)
    assert world.all_reduce(MASKED.filled(0)).tolist() == [0.0, 2.0]
    assert world.all_reduce(np.ma.getmaskarray(MASKED)).tolist() == [1, 0]

    class Distant:
        def __dlpack__(self, **_):
            raise AssertionError("not to be read")

        def __dlpack_device__(self):
            return 4, 0  # OpenCL

    error = "a Distant on a device of DLPack's kind 4 cannot be sent; copy it to the CPU"
    refused(UsageError, error, world.all_reduce, Distant())


def test_arguments_are_checked(world):
    for op in ("avg", None, ["sum"]):
        refused(UsageError, r"unknown reduction .*; choose one of sum, max, min, mean", world.all_reduce, 1, op)
    for dtype in ("complex64", "U3", "datetime64[s]", "longdouble", "f4,i4"):
        error = r"cannot be reduced; convert it to float16, float32, float64, bool or an int"
        refused(UsageError, error, world.all_reduce, np.zeros(3, dtype))
    for root in (1, -1, "0", None, 0.0):
        for call in (world.broadcast, world.broadcast_object):
            refused(UsageError, rf"root .*{root!r}; it must be an integer in 0", call, 1, root)
    assert world.broadcast(1, np.int64(0)) == 1


def test_plain_arrays_and_tensors_keep_their_type_and_memory(world):
    array = np.arange(6.0).reshape(2, 3)
    for given_ in (tensor.from_numpy(array).data, np.array(array).view(np.recarray)):
        result = world.all_reduce(given_)
        assert (type(result), result.tolist()) == (np.ndarray, array.tolist())
    own = tensor.Tensor(data=np.arange(6), dtype=np.int64)
    shared = np.from_dlpack(own)
    own.array[1] = 7
    assert shared.tolist() == [0, 7, 2, 3, 4, 5]
    again = tensor.Tensor.from_dlpack(own)
    assert (type(again), again.dtype, again.device) == (tensor.Tensor, np.int64, own.device)
    again.array[0] = 9
    assert own.array[0] == 9


def test_tensors_of_pytorch_share_memory_and_keep_their_type(world):
    torch = pytest.importorskip("torch")
    theirs = torch.arange(6.0).reshape(2, 3)
    ours = tensor.Tensor.from_dlpack(theirs)
    ours.array[1, 2] = -1
    assert theirs[1, 2] == -1
    back = torch.from_dlpack(ours)
    back[0, 0] = 8
    assert ours.array[0, 0] == 8
    refused(UsageError, "strided", tensor.Tensor.from_dlpack, theirs.T)
    for value in (theirs.T[::2], theirs[1, 2].half(), theirs[:0] > 1):
        for result in (world.all_reduce(value, "max"), world.broadcast(value), world.all_gather(value)[0]):
            assert (type(result), result.dtype) == (torch.Tensor, value.dtype)
            assert torch.equal(result, value)
    parameter = torch.nn.Parameter(torch.ones(3))
    error = r"a Parameter cannot be read through DLPack \(.*detach.*; pass a den"
    refused(UsageError, error, world.all_reduce, parameter)
    assert type(world.all_reduce(parameter.detach())) is torch.Tensor
    negated = torch.ones(2, dtype=torch.complex64).conj().imag
    for call in (world.all_reduce, world.broadcast, world.all_gather, tensor.Tensor.from_dlpack):
        refused(UsageError, "negative bit would lose its sign; pass its resolve_neg", call, negated)
    for wrong in (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, device="meta"), torch.ones(2).to_sparse()):
        refused(UsageError, "a Tensor ", world.all_reduce, wrong)


@given(st.data())
def test_integer_sums_are_exact_or_refused(data):
    """The wires of up to five ranks, summed as a transport does, against Python's integers."""
    dtype = np.dtype(data.draw(st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">u8"])))
    ranks = data.draw(st.integers(1, 5))
    elements = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    values = [data.draw(arrays_of.arrays(dtype, (3,), elements=elements)) for _ in range(ranks)]
    made = [reducible(take(value).array, "sum") for value in values]
    total = np.sum([wire for wire, _ in made], 0, dtype=made[0][0].dtype)
    expected = [sum(int(value[i]) for value in values) for i in range(3)]
    if np.iinfo(dtype).min <= min(expected) and max(expected) <= np.iinfo(dtype).max:
        result = made[0][1](total)
        assert (result.dtype, result.tolist()) == (dtype, expected)
    else:
        refused(UsageError, "does not fit in", lambda: made[0][1](total))


@given(arrays_of.arrays(np.uint64, (2, 4)))
def test_unsigned_extremes_are_found_through_signed_wires(values):
    for op, reduction in (("max", np.maximum), ("min", np.minimum)):
        (first, restored), (second, _) = (reducible(row, op) for row in values)
        assert first.dtype == np.int64
        assert restored(reduction(first, second)).tolist() == reduction(*values).tolist()


def assert_alike(a, b):
    assert type(a) is type(b)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_alike(x, y)
    elif isinstance(a, dict):
        assert_alike([*a.items()], [*b.items()])
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    else:
        assert repr(a) == repr(b)


@pytest.mark.slow
@given(DATA)
def test_data_goes_to_bytes_and_back(value):
    assert_alike(unpacked(packed(value)), value)


LOOPED: list = []
LOOPED.append(LOOPED)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, NOT_SENT),
        ({"a": [0, (1, 2j)]}, "obj['a'][1][1] is a complex"),
        ({(1, 2j): 1}, "a key of obj[1] is a complex"),
        ({"w": tensor.Tensor((2,))}, "obj['w'] is a Tensor"),
        ([np.array([None])], "obj[0] is a ndarray of object"),
        (np.zeros(2, OVERLAPPING), "obj is a ndarray of {"),
        (lambda: 1, "obj is a function"),
        (10**5000, "obj is a int"),
        ({10**5000: 1}, "a key of obj is a int"),
        (LOOPED, "obj is nested too deeply, or contains itself"),
    ],
    ids=range(10),
)
def test_the_offending_part_is_named(world, value, message):
    refused(UsageError, re.escape(f"broadcast_object on rank 0: {message}"), world.broadcast_object, value)
