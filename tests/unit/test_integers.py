"""Arguments that are integers: NumPy's are taken, and booleans, floats and text refused, in every front."""

import numpy as np
import pytest

from distopt import autograd, initializer, launch, layer, opt, tensor
from distopt.checkpoint import Checkpoint
from distopt.checks import check_integer
from distopt.codecs import PowerSGD, TopK
from distopt.comm.single import SingleCommunicator
from distopt.comm.world import World
from distopt.data import ShardedSampler, data_partition
from distopt.device import create_cuda_gpus
from distopt.engine.engine import Engine
from distopt.errors import UsageError
from distopt.launch.job.topology import Topology
from distopt.nn.devices.device import Device
from distopt.tensor import Tensor
from tests.unit.refusals import refused

X = Tensor((2, 3, 4, 4))
ROWS = np.zeros((4, 2))


def one() -> SingleCommunicator:
    return SingleCommunicator(Topology.of_one_host(0, 1, "here"))


def trained(kind: str = "fp32", **options) -> None:
    optimizer = opt.DistOpt(opt.SGD(lr=0.1), communicator=one(), **options)
    autograd.training = True
    optimizer.step_by(kind, autograd.reduce_sum(Tensor((2, 2)) * Tensor((2, 2), stores_grad=True)))


# By the argument: an integer that it takes, and a call.
CALLS = {
    "nb_kernels of Conv2d": (4, lambda n: layer.Conv2d(n, 3)),
    "kernel_size of Conv2d": (3, lambda n: layer.Conv2d(4, n)(X)),
    "a pair": (3, lambda n: layer.Conv2d(4, (n, 3), stride=[n, 1], padding=(n, n, n, n))(X)),
    "kernel_size of SINGA's form": (3, lambda n: layer.Conv2d(n, 4, n, 1, 1)(X)),
    "nb_kernels of SINGA's form": (3, lambda n: layer.Conv2d(3, n, 3)(X)),
    **{name: (1, lambda n, k=name: layer.Conv2d(4, 3, **{k: n})(X)) for name in ("padding", "group", "dilation")},
    "SeparableConv2d": (3, lambda n: layer.SeparableConv2d(n, n)(X)),
    "MaxPool2d": (2, lambda n: layer.MaxPool2d(n, n)(X)),
    "AvgPool1d": (2, lambda n: layer.AvgPool1d(n)(Tensor((2, 3, 1, 4)))),
    "channels": (3, lambda n: layer.BatchNorm2d(n)(X)),
    "Linear": (3, lambda n: layer.Linear(n)(Tensor((2, 3)))),
    "in_features": (3, lambda n: layer.Linear(n, 2)(Tensor((2, 3)))),
    "Gemm": (3, lambda n: layer.Gemm(n)(Tensor((2, 3)))),
    "Flatten": (1, lambda n: layer.Flatten(n)(X)),
    "Cat": (1, lambda n: layer.Cat(n)([X, X])),
    "a shape": (2, lambda n: Tensor((n, 3))),
    "reshape": (4, lambda n: autograd.reshape(X, (n, -1))),
    "Tensor.reshape": (4, lambda n: X.reshape((n, -1))),
    "an index": (1, lambda n: X[n]),
    "an offset": (1, lambda n: Tensor((3,)).copy_from_numpy(np.ones(2), n)),
    "softmax": (1, lambda n: autograd.softmax(X, n)),
    "axes": (1, lambda n: autograd.reduce_sum(X, [n])),
    "transpose": (1, lambda n: autograd.transpose(X, (0, n, 2, 3))),
    "squeeze": (0, lambda n: autograd.squeeze(Tensor((1, 3)), n)),
    "unsqueeze": (1, lambda n: autograd.unsqueeze(X, n)),
    "several axes": (0, lambda n: autograd.unsqueeze(X, [n, 1])),
    "slice": (1, lambda n: autograd.slice(X, [n], [n], [n], [n])),
    "parts": (1, lambda n: autograd.split(X, 1, [n, 2])),
    "num_output": (3, lambda n: autograd.split(X, 1, num_output=n)),
    "tile": (2, lambda n: autograd.tile(X, n)),
    "tile of each": (2, lambda n: autograd.tile(X, [n, 1])),
    "Tensor.repeat": (2, lambda n: X.repeat(n)),
    "reshape to a row": (96, lambda n: autograd.reshape(X, n)),
    "one axis": (1, lambda n: autograd.reduce_mean(X, n)),
    "expand": (2, lambda n: autograd.expand(Tensor((1, 3)), (n, 3))),
    "pad": (1, lambda n: autograd.pad(Tensor((2, 2)), "constant", [n, 0, 0, 0])),
    "blocksize": (2, lambda n: autograd.space_to_depth(X, n)),
    "flatten": (1, lambda n: autograd.flatten(X, n)),
    "cat": (1, lambda n: autograd.cat([X, X], n)),
    "depth": (5, lambda n: autograd.onehot(-1, tensor.from_numpy(np.array([1, 2])), n, [0, 1])),
    "fan_in": (3, lambda n: initializer.gaussian(Tensor((3, 4)), n)),
    "a seed": (3, lambda n: Device("cpu", 0, np).SetRandSeed(n)),
    "skipped iterations": (3, lambda n: Device("cpu", 0, np).SetSkipIteration(n)),
    "a number of GPUs": (0, create_cuda_gpus),
    "rank of PowerSGD": (2, PowerSGD),
    "k of TopK": (2, lambda n: TopK(k=n)),
    "warm_up_steps": (2, lambda n: TopK(0.1, warm_up_steps=n)),
    **{name: (2, lambda n, k=name: trained(**{k: n})) for name in ("check_every", "bucket_elements", "buffSize")},
    "partition_elements": (2, lambda n: trained("partialUpdate", partition_elements=n)),
    "check_every of an engine": (2, lambda n: Engine(one(), check_every=n)),
    "count of wire memory": (2, lambda n: one().empty(n)),
    "root": (0, lambda n: one().broadcast(np.zeros(1), n)),
    "a subgroup": (0, lambda n: one().subgroup([n])),
    "root of a world": (0, lambda n: World(None, one()).broadcast(1, n)),
    "size of a data set": (8, lambda n: ShardedSampler(n, 2, 0, 2)),
    "batch_size": (2, lambda n: ShardedSampler(8, 2, 0, n)),
    "rank of a sampler": (1, lambda n: ShardedSampler(8, 2, n, 2)),
    "an epoch": (1, lambda n: ShardedSampler(8, 2, 0, 2).set_epoch(n)),
    "rank of a partition": (1, lambda n: data_partition(ROWS, ROWS, n, 2)),
    **{name: (2, lambda n, k=name: Checkpoint(None, **{k: n}, a=np.zeros(1))) for name in ("every", "keep")},
    "an epoch of a checkpoint": (2, lambda n: Checkpoint(None, a=np.zeros(1)).step(n)),
    "local_rank": (0, lambda n: launch.MultiprocessJob(launch.Ticket(), n, 1).close()),
    "world_size": (1, lambda n: launch.MultiprocessJob(launch.Ticket(), 0, n).close()),
}


@pytest.mark.parametrize("name", CALLS)
def test_numpys_integers_are_taken_and_nothing_else(name):
    good, call = CALLS[name]
    for number in (good, np.int64(good), np.uint8(good), np.array(good)):
        call(number)
    for wrong in (True, np.bool_(True), float(good) + 0.5, str(good)):
        assert str(wrong) in str(refused(UsageError, "", call, wrong))


def test_what_becomes_of_numpys_integers(tmp_path):
    assert type(check_integer("size", np.int8(3), 3)) is int
    with pytest.raises(UsageError, match=r"^size is np\.int64\(2\); it must be an integer of at least 3$"):
        check_integer("size", np.int64(2), 3)
    refused(UsageError, r"^size is 2\.0; it must be an integer$", check_integer, "size", 2.0)
    assert repr(PowerSGD(np.int64(2))) == repr(PowerSGD(2))
    assert repr(TopK(k=np.uint8(5))) == repr(TopK(k=5))
    saver = Checkpoint(tmp_path, a=np.zeros(1))
    saver.resume()
    saver.save(np.int64(3))
    saver.close()
    assert Checkpoint(tmp_path, a=np.zeros(1)).resume().epoch == 3
