"""A small net and its data, trained by ranks that the tests start."""

import itertools
import os
from pathlib import Path

import numpy as np

from distopt import autograd, launch, layer, model, opt, singa_wrap, tensor
from distopt.codecs import BFloat16, ErrorFeedback, Fp16, Fp32, PowerSGD, Threshold, TopK
from distopt.comm import create

FEATURES, CLASSES, BATCH = 21, 5, 16
SMALL = 300  # elements; cuts the net into several buckets
STRATEGIES = {
    "fp32": Fp32(),
    "fp16": Fp16(),
    "bf16": BFloat16(),
    "fp16 scaled": ErrorFeedback(Fp16(scale="dynamic")),
    "top-K": ErrorFeedback(TopK(0.05)),
    "top-K 100 %": TopK(1.0),
    "top-K alone": TopK(0.3),
    "warm-up": ErrorFeedback(TopK(0.02, warm_up_steps=4, clip_norm=5.0)),
    "threshold": ErrorFeedback(Threshold(0.02)),
    "threshold 0": Threshold(0.0),
    "PowerSGD": ErrorFeedback(PowerSGD(rank=2)),
    "partial": "partialUpdate",
}


class Net(model.Model):
    def __init__(self, hidden: int = 31, classes: int = CLASSES) -> None:
        super().__init__()
        self.linear1 = layer.Linear(hidden, activation="RELU")
        self.linear2 = layer.Linear(classes)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear2(self.linear1(x))

    def train_one_batch(self, x, y, step=None):
        loss = self.loss(self.forward(x), y)
        (step or self.optimizer)(loss)
        return loss


def batch(step: int, rank: int, device=None) -> tuple[tensor.Tensor, tensor.Tensor]:
    """Learnable: the class is that of the nearest of fixed centres."""
    rng = np.random.default_rng([step, rank])
    centres = np.random.default_rng(99).standard_normal((CLASSES, FEATURES), np.float32) * 2
    labels = rng.integers(0, CLASSES, BATCH, np.int32)
    noise = rng.standard_normal((BATCH, FEATURES), np.float32)
    return tensor.from_numpy(centres[labels] + noise, device), tensor.from_numpy(labels, device)


def whole(numbers) -> list[tensor.Tensor]:
    """The batches of these pairs of step and rank as one."""
    pairs = [batch(step, rank) for step, rank in numbers]
    return [tensor.from_numpy(np.concatenate([part.array for part in parts])) for parts in zip(*pairs, strict=True)]


def build(optimizer) -> Net:
    device = getattr(optimizer, "device", tensor.Tensor((1,)).device)  # a rule of one process has none
    device.SetRandSeed(3)
    net = Net()
    net.set_optimizer(optimizer)
    net.compile([batch(0, 0, device)[0]], is_train=True)
    return net


def sgd() -> opt.SGD:
    return opt.SGD(lr=0.05, momentum=0.5)


def make(rank: int, world_size: int, ticket, **options) -> opt.DistOpt:
    return opt.DistOpt(sgd(), ticket, rank, world_size, **{"bucket_elements": SMALL, **options})


def beside(optimizer, rule=None, **options) -> opt.DistOpt:
    """Another one, on the same communicator."""
    options = {"bucket_elements": SMALL, **options}
    return opt.DistOpt(rule or sgd(), communicator=optimizer.communicator, **options)


def parameters(net: model.Model) -> np.ndarray:
    return joined(net.get_params())


def states(net: model.Model) -> np.ndarray:
    return joined(net.get_states())


def joined(tensors: dict[str, tensor.Tensor]) -> np.ndarray:
    return np.concatenate([tensors[name].to_numpy().reshape(-1) for name in sorted(tensors)])


def step_of(optimizer, strategy):
    if strategy == "partialUpdate":
        return lambda loss: optimizer.step_by(strategy, loss)
    return lambda loss: optimizer.reduce_and_update(loss, strategy, SMALL)


def by_hand(optimizer, loss) -> None:
    """SINGA's loop as its documentation writes it, with the fused call for all but the first gradient."""
    (_, first), *others = pairs = list(autograd.backward(loss))
    optimizer.all_reduce(first)
    rest = [grad for _, grad in others]
    optimizer.fused_all_reduce(rest[:1], send=False)
    optimizer.fused_all_reduce(rest, send=True)
    optimizer.wait()
    for param, grad in pairs:
        optimizer.update(param, grad)
    optimizer.opt.step()


def train(optimizer, net: Net, steps: range, strategy) -> list[float]:
    return [net(*batch(n, optimizer.global_rank, optimizer.device), step_of(optimizer, strategy)).item() for n in steps]


def enter(rank: int, world_size: int, ticket, folder: str, body, *args) -> None:
    optimizer = make(rank, world_size, ticket)
    np.savez(Path(folder) / f"{rank}.npz", **body(optimizer, *args))
    optimizer.communicator.barrier()


def spawned(folder: Path, world_size: int, target, *args) -> list[dict[str, np.ndarray]]:
    """The results of ranks that `launch.spawn` starts, and whose target is as `enter`."""
    launch.spawn(target, world_size, (singa_wrap.NcclIdHolder(), str(folder), *args))
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(world_size)]


def on_ranks(world_size: int, body, *args) -> list:
    """Results of `body(optimizer, *args)`, by rank; the ranks start faster than `spawned` ones."""
    from tests.conformance.ranks import run_ranks_ok  # which looks for UCX

    return run_ranks_ok(with_optimizer, world_size, body, *args)


def with_optimizer(job, body, *args):
    os.environ["DISTOPT_DEVICE"] = "cpu"
    with create(job) as communicator:
        result = body(opt.DistOpt(sgd(), communicator=communicator, bucket_elements=SMALL), *args)
        communicator.barrier()
    return result


def assert_equal_bits(ranks: list[dict[str, np.ndarray]], *keys: str) -> None:
    """Of the arrays under these keys, or all."""
    for key, other in itertools.product(keys or ranks[0], ranks[1:]):
        np.testing.assert_array_equal(ranks[0][key].view(np.int32), other[key].view(np.int32), err_msg=key)
