"""`distopt.init` in one process, what a world takes and gives, exact integer sums, and data as bytes."""

import json
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


@pytest.fixture
def world():
    made = distopt.init(launch.Ticket(), 0, 1)
    yield made
    made.close()


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# -- the package -----------------------------------------------------------------------------------------------------
def test_importing_the_package_loads_nothing_heavy():
    loaded = json.loads(run("import sys, distopt; distopt.__version__; import json; print(json.dumps([*sys.modules]))"))
    assert "distopt" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {"numpy", "mpi4py", "cupy", "safetensors", "torch"}
    assert not [name for name in loaded if name.startswith("distopt.")]


def test_version_and_absent_names():
    assert distopt.__version__ == version("distopt-train")
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = distopt.no_such_name


# -- life cycle ------------------------------------------------------------------------------------------------------
def test_init_returns_the_open_world_and_after_close_a_new_one(world):
    assert distopt.init() is world
    assert current() is world
    with pytest.raises(UsageError, match=r"has an open World\(rank 0 of 1.*; close it before it joins another job"):
        distopt.init(launch.Ticket(), 0, 1)
    world.close()
    world.close()
    assert current() is None
    with distopt.init(launch.Ticket(), 0, 1) as again:
        assert again is not world
        assert again.all_reduce(3) == 3
    assert again.closed


def test_attributes_and_repr(world):
    assert (world.rank, world.world_size, world.local_rank, world.local_size, world.is_main) == (0, 1, 0, 1, True)
    (host,) = world.hosts
    assert repr(world) == f"World(rank 0 of 1, local rank 0 of 1 on {host}, single)"
    world.close()
    assert repr(world) == f"World(rank 0 of 1, local rank 0 of 1 on {host}, single, closed)"


@pytest.mark.parametrize("method", ["all_reduce", "broadcast", "all_gather", "broadcast_object"])
def test_a_closed_world_says_so(world, method):
    world.close()
    with pytest.raises(CommunicatorClosedError, match=r"rank 0 has closed its world; call distopt.init\(\) again"):
        getattr(world, method)(1)
    with pytest.raises(CommunicatorClosedError, match="has closed its world"):
        world.barrier()


def test_an_exception_leaves_the_world_open(world):
    with pytest.raises(KeyError), world:
        raise KeyError
    assert not world.closed
    with world:
        pass
    assert world.closed


def test_an_optimizer_uses_the_world_unless_told_otherwise(world):
    assert opt.DistOpt(opt.SGD()).communicator is world.communicator
    ticket = launch.Ticket()
    for other in (
        opt.DistOpt(opt.SGD(), ticket, 0, 1),
        opt.DistOpt(opt.SGD(), job=launch.MultiprocessJob(ticket, 0, 1)),
    ):
        assert other.communicator is not world.communicator
    world.close()
    assert opt.DistOpt(opt.SGD(), ticket, 0, 1).communicator is not world.communicator


def test_a_forked_child_is_no_rank_of_its_parents_job():
    assert (
        run("""
import os, distopt
from distopt import launch
world = distopt.init(launch.Ticket(), 0, 1)
pid = os.fork()
if pid == 0:
    with distopt.init(launch.Ticket(), 0, 1) as own:
        os._exit(0 if own is not world and own.all_reduce(2) == 2 else 1)
print(os.waitpid(pid, 0)[1], world.all_reduce(4))
""")
        == "0 4\n"
    )


# -- what a world takes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            [1, 2],
            "a list is neither a number nor an array; convert it with numpy.asarray, or send it as it is with bro",
        ),
        ((1.0,), "a tuple is neither"),
        (None, "a NoneType is neither"),
        ("text", "a str is neither"),
        (1j, "a complex is neither"),
        (Decimal(1), "a Decimal is neither"),
        (np.str_("a"), "a str_ is neither"),
        (np.complex64(1), "a complex64 is neither"),
        (np.timedelta64(1, "s"), "a timedelta64 is neither"),
        (
            np.ma.masked_array([1, 2], [True, False]),
            "a masked array would lose its mask; pass array.filled(0), say, and",
        ),
        (2**63, "an int of 64 bits does not fit in int64; pass it as a float"),
        (np.array([None]), "an array of type object holds no plain data; convert it with array.astype"),
        (np.zeros(3, "V0"), "holds no plain data"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_one_line(world, collective, value, message):
    with pytest.raises(UsageError) as caught:
        getattr(world, collective)(value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["complex64", "U3", "datetime64[s]", "longdouble", "f4,i4"])
def test_types_that_have_no_sum_are_refused(world, dtype):
    with pytest.raises(UsageError, match=r"cannot be reduced; convert it to float16, float32, float64, bool or an int"):
        world.all_reduce(np.zeros(3, dtype))


def test_numbers_longer_than_a_float_keep_their_bits_or_are_refused(world):
    big = np.longdouble("1e4000")
    if not np.isfinite(big):
        pytest.skip("long doubles are doubles here")
    with pytest.raises(UsageError, match="float128 cannot be reduced; convert it to float16, float32, float64"):
        world.all_reduce(big)
    for found in (world.broadcast(big), world.all_gather(big)[0], world.broadcast_object(big)):
        assert (type(found), found) == (np.longdouble, big)


def test_masked_arrays_are_refused_with_advice_that_is_sound(world):
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    for call in (
        world.broadcast_object,
        world.communicator.all_reduce,
        tensor.from_numpy,
        lambda array: tensor.Tensor(data=array),
        tensor.Tensor((2,)).copy_from_numpy,
        lambda array: tensor.Tensor((2,)) + array,
    ):
        with pytest.raises(UsageError, match=r"a masked array would lose its mask; pass array.filled\(0\), say, and"):
            call(masked)
    assert world.all_reduce(masked.filled(0)).tolist() == [0.0, 2.0]
    assert world.all_reduce(np.ma.getmaskarray(masked)).tolist() == [1, 0]


def test_arguments_are_checked(world):
    for op in ("avg", None, ["sum"]):
        with pytest.raises(UsageError, match=r"unknown reduction .*; choose one of sum, max, min, mean"):
            world.all_reduce(1, op)
    for root in (1, -1, "0", None, 0.0):
        for call in (world.broadcast, world.broadcast_object):
            with pytest.raises(UsageError, match=rf"root .*{root!r}; it must be an integer in 0"):
                call(1, root)
    assert world.broadcast(1, np.int64(0)) == 1


def test_subclasses_and_raw_tensors_give_plain_arrays(world):
    array = np.arange(6.0).reshape(2, 3)
    for given_ in (tensor.from_numpy(array).data, np.array(array).view(np.recarray)):
        result = world.all_reduce(given_)
        assert type(result) is np.ndarray
        assert result.tolist() == array.tolist()


def test_tensors_keep_their_type_and_export_their_memory(world):
    own = tensor.Tensor(data=np.arange(6), dtype=np.int64)
    shared = np.from_dlpack(own)
    own.array[1] = 7
    assert shared.tolist() == [0, 7, 2, 3, 4, 5]
    again = tensor.Tensor.from_dlpack(own)
    assert (type(again), again.dtype, again.device) == (tensor.Tensor, np.int64, own.device)
    again.array[0] = 9
    assert own.array[0] == 9
    result = world.all_reduce(own)
    assert (type(result), result.dtype) == (tensor.Tensor, np.int64)
    result.array[...] = -1
    assert own.array.tolist() == [9, 7, 2, 3, 4, 5]


def test_pytorch_and_tensors_share_memory():
    torch = pytest.importorskip("torch")
    theirs = torch.arange(6.0).reshape(2, 3)
    ours = tensor.Tensor.from_dlpack(theirs)
    ours.array[1, 2] = -1
    assert theirs[1, 2] == -1
    back = torch.from_dlpack(ours)
    back[0, 0] = 8
    assert ours.array[0, 0] == 8
    with pytest.raises(UsageError, match="strided"):
        tensor.Tensor.from_dlpack(theirs.T)


def test_tensors_of_pytorch(world):
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int8, torch.int64, torch.uint8, torch.bool):
        whole = (torch.arange(15).reshape(3, 5) % 4).to(dtype)
        for value in (whole, whole.T[::2], whole[1, 2], whole[:0]):
            for result in (world.all_reduce(value, "max"), world.broadcast(value), world.all_gather(value)[0]):
                assert type(result) is torch.Tensor
                assert result.dtype == dtype
                assert torch.equal(result, value)
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match=r"a Parameter cannot be read through DLPack \(.*detach.*; pass a den"):
        world.all_reduce(parameter)
    assert type(world.all_reduce(parameter.detach())) is torch.Tensor
    negated = torch.ones(2, dtype=torch.complex64).conj().imag
    for call in (world.all_reduce, world.broadcast, world.all_gather, tensor.Tensor.from_dlpack):
        with pytest.raises(UsageError, match="negative bit would lose its sign; pass its resolve_neg"):
            call(negated)
    for wrong in (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, device="meta"), torch.ones(2).to_sparse()):
        with pytest.raises(UsageError, match="a Tensor "):
            world.all_reduce(wrong)


def test_arrays_on_another_device_are_refused(world):
    class Distant:
        def __dlpack__(self, **_):
            raise AssertionError("not to be read")

        def __dlpack_device__(self):
            return 4, 0  # OpenCL

    with pytest.raises(UsageError, match="a Distant on a device of DLPack's kind 4 cannot be sent; copy it to the CPU"):
        world.all_reduce(Distant())


# -- integers ----------------------------------------------------------------------------------------------------------
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
        with pytest.raises(UsageError, match="does not fit in"):
            made[0][1](total)


@given(arrays_of.arrays(np.uint64, (2, 4)))
def test_unsigned_extremes_are_found_through_signed_wires(values):
    for op, reduction in (("max", np.maximum), ("min", np.minimum)):
        (first, restored), (second, _) = (reducible(row, op) for row in values)
        assert first.dtype == np.int64
        assert restored(reduction(first, second)).tolist() == reduction(*values).tolist()


# -- data as bytes -----------------------------------------------------------------------------------------------------
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)
DATA = st.recursive(
    SCALARS | arrays_of.arrays(arrays_of.scalar_dtypes(), arrays_of.array_shapes(min_dims=0, min_side=0)),
    lambda parts: st.lists(parts) | st.tuples(parts, parts) | st.dictionaries(KEYS, parts),
    max_leaves=12,
)


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


def looped() -> list:
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {1, 2},
            "obj is a set, which is not sent; convert it to None, bool, int, float, str, bytes, list, tuple, dict ",
        ),
        ({"a": [0, (1, 2j)]}, "obj['a'][1][1] is a complex"),
        ({(1, 2j): 1}, "a key of obj[1] is a complex"),
        ({"w": tensor.Tensor((2,))}, "obj['w'] is a Tensor"),
        ([np.array([None])], "obj[0] is a ndarray of object"),
        (np.zeros(2, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0]}), "obj is a ndarray of {"),
        (lambda: 1, "obj is a function"),
        (10**5000, "obj is a int"),
        ({10**5000: 1}, "a key of obj is a int"),
        (looped(), "obj is nested too deeply, or contains itself"),
    ],
    ids=range(10),
)
def test_the_offending_part_is_named(world, value, message):
    with pytest.raises(UsageError) as caught:
        world.broadcast_object(value)
    assert f"broadcast_object on rank 0: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)
