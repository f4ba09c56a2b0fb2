"""Batch normalization by the statistics of all ranks: one rank that has all their batches computes the same."""

import numpy as np
import pytest

from distopt import layer, model, opt, tensor
from distopt.errors import UsageError
from tests.ranks.small_net import assert_equal_bits, on_ranks, sgd, states

CLASSES, STEPS = 4, 6


def images_of(rank: int) -> int:
    return 3 + 2 * rank


class Net(model.Model):
    def __init__(self, norm=layer.SyncBatchNorm2d) -> None:
        super().__init__()
        self.first, self.norm1 = norm(), norm(momentum=0.7, activation="RELU")
        self.conv1, self.widen = layer.Conv2d(5, 3, padding=1, bias=False), layer.Conv2d(5, 1)
        self.conv2, self.norm2 = layer.Conv2d(7, 3, stride=2), norm()
        self.flatten, self.linear, self.loss = layer.Flatten(), layer.Linear(CLASSES), layer.SoftMaxCrossEntropy()

    def forward(self, x):
        first = self.first(x)
        y = self.norm1(self.conv1(first), self.widen(first))
        return self.linear(self.flatten(self.norm2(self.conv2(y))))

    def train_one_batch(self, x, y, share=1.0):
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss if share == 1.0 else loss * share)
        return loss


def batch(step: int, ranks: range, dtype=np.float32) -> tuple[tensor.Tensor, tensor.Tensor]:
    """Of these ranks, one after the other; means are large beside deviations, and differ."""
    rngs = [(rank, np.random.default_rng([step, rank])) for rank in ranks]
    x = [rng.standard_normal((images_of(rank), 3, 6, 6)) * 0.5 + 3 + rank for rank, rng in rngs]
    y = [rng.integers(0, CLASSES, images_of(rank)) for rank, rng in rngs]
    return tensor.Tensor.of(np.concatenate(x).astype(dtype)), tensor.from_numpy(np.concatenate(y))


def build(optimizer, norm=layer.SyncBatchNorm2d, dtype=np.float32) -> Net:
    tensor.Tensor((1,)).device.SetRandSeed(3)
    net = Net(norm)
    net.set_optimizer(optimizer)
    net.compile([batch(0, range(1), dtype)[0]], is_train=True)
    return net


def trained(optimizer, dtype: str) -> dict[str, np.ndarray]:
    """Batches of different sizes, whose losses count by their images."""
    rank, size = optimizer.global_rank, optimizer.world_size
    share = images_of(rank) * size / sum(map(images_of, range(size)))
    net, whole = build(optimizer, dtype=dtype), build(sgd(), layer.BatchNorm2d, dtype=dtype)
    for step in range(STEPS):
        net(*batch(step, range(rank, rank + 1), dtype), share)
        whole(*batch(step, range(size), dtype))
    tolerance = {"float64": 1e-10, "float32": 2e-4, "float16": 3e-2}[dtype]
    np.testing.assert_allclose(states(net), states(whole), rtol=tolerance, atol=tolerance)
    net.eval()
    whole.eval()
    if rank == 0:  # local
        found, expected = (one(batch(9, range(1), dtype)[0]).to_numpy() for one in (net, whole))
        np.testing.assert_allclose(found, expected, rtol=20 * tolerance, atol=20 * tolerance)
    return {"states": states(net)}


def refused(optimizer) -> None:
    net, local = build(optimizer), build(opt.SGD(lr=0.05))
    assert net.norm1.reduce == optimizer.reduce
    with optimizer.join():
        with pytest.raises(UsageError, match=r"use BatchNorm2d inside DistOpt.join"):
            net(*batch(0, range(1)))
        net.optimizer = opt.SGD(lr=0.05)  # from now on, statistics are those of this rank
        net(*batch(0, range(1)))
        plain = build(optimizer, layer.BatchNorm2d)
        plain(*batch(0, range(1)))
    local(*batch(0, range(optimizer.global_rank + 1)))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("world_size", "dtype"), [(3, "float32"), (1, "float32"), (3, "float64"), (3, "float16")])
def test_as_one_rank_with_all_batches(world_size, dtype):
    assert_equal_bits(on_ranks(world_size, trained, dtype))


def test_where_ranks_may_have_no_batch_it_is_refused():
    on_ranks(2, refused)
