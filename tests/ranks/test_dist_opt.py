"""DistOpt with real ranks: what it computes must not depend on how many ranks there are or how bytes move."""

import functools
from pathlib import Path

import numpy as np
import pytest

from distopt import autograd, device, launch, layer, model, opt, singa_wrap, tensor
from distopt.errors import RankFailedError

FEATURES, CLASSES, STEPS = 33, 7, 20


class Net(model.Model):
    def __init__(self, width: int = 65) -> None:
        super().__init__()
        self.linear1 = layer.Linear(width, activation="RELU")
        self.linear2 = layer.Linear(CLASSES)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear2(self.linear1(x))

    def train_one_batch(self, x, y, step):
        out = self.forward(x)
        loss = self.loss(out, y)
        step(self.optimizer, loss)
        return out, loss


def batch(step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    return rng.standard_normal((size, FEATURES), np.float32), rng.integers(0, CLASSES, size, np.int32)


def sgd() -> opt.SGD:
    return opt.SGD(lr=0.05, momentum=0.9, weight_decay=1e-4)


def train(optimizer, part: slice, size: int, step=lambda optimizer, loss: optimizer(loss)) -> np.ndarray:
    """The flat parameters after every step, [STEPS, n], of a net trained on `part` of each batch."""
    device.get_default_device().SetRandSeed(0)
    net = Net()
    net.set_optimizer(optimizer)
    x, _ = batch(0, size)
    net.compile([tensor.from_numpy(x[part])], is_train=True)
    net.train()
    history = []
    for number in range(STEPS):
        x, y = batch(number, size)
        net(tensor.from_numpy(x[part]), tensor.from_numpy(y[part]), step)
        params = net.get_params()
        history.append(np.concatenate([params[name].array.reshape(-1) for name in sorted(params)]))
    return np.stack(history)


def train_rank(rank: int, world_size: int, ticket, folder: str, step) -> None:
    optimizer = opt.DistOpt(sgd(), ticket, rank, world_size)
    history = train(optimizer, slice(rank * 32, rank * 32 + 32), 32 * world_size, step)
    np.save(Path(folder) / f"{rank}.npy", history)
    optimizer.communicator.barrier()


def histories(folder: Path, world_size: int, step) -> list[np.ndarray]:
    folder.mkdir()
    launch.spawn(train_rank, world_size, (singa_wrap.NcclIdHolder(), str(folder), step))
    return [np.load(folder / f"{rank}.npy") for rank in range(world_size)]


def call(optimizer, loss) -> None:
    optimizer(loss)


def small_buckets(optimizer, loss) -> None:
    optimizer.backward_and_update(loss, threshold=500)


def by_hand(optimizer, loss) -> None:
    """SINGA's loop as its documentation writes it, with the fused call for all but the first gradient."""
    pairs = list(autograd.backward(loss))
    first, rest = pairs[0][1], [grad for _, grad in pairs[1:]]
    optimizer.all_reduce(first)
    optimizer.fused_all_reduce(rest[:1], send=False)
    optimizer.fused_all_reduce(rest, send=True)
    optimizer.wait()
    for param, grad in pairs:
        optimizer.update(param, grad)
    optimizer.opt.step()


@functools.lru_cache
def single_process(size: int) -> np.ndarray:
    return train(sgd(), slice(0, size), size)


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=3)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [call, small_buckets, by_hand])
def test_ranks_follow_one_process(tmp_path, world_size, step):
    ranks = histories(tmp_path / "a", world_size, step)
    np.testing.assert_allclose(ranks[0], single_process(32 * world_size), rtol=0, atol=1e-5)
    for other in ranks[1:]:
        np.testing.assert_array_equal(ranks[0].view(np.int32), other.view(np.int32))
    again = histories(tmp_path / "b", world_size, step)
    np.testing.assert_array_equal(ranks[0].view(np.int32), again[0].view(np.int32))


def other_model(rank: int, world_size: int, ticket) -> None:
    optimizer = opt.DistOpt(sgd(), ticket, rank, world_size)
    net = Net(width=65 + (rank == 1))
    net.set_optimizer(optimizer)
    net.compile([tensor.from_numpy(batch(0, 4)[0])], is_train=True)


@pytest.mark.slow
def test_another_model_on_one_rank_is_named():
    with pytest.raises(RankFailedError, match=r"rank 1 .* trains another model .*linear1.W of shape \[33, 65\]"):
        launch.spawn(other_model, 3, (singa_wrap.NcclIdHolder(),))
