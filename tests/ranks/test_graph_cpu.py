"""Training steps that are replayed on the CPU: the bits are those of steps that run as they are called."""

from __future__ import annotations

import numpy as np
import pytest

from distopt import autograd, opt, tensor
from distopt.nn.ops import elementwise
from tests.ranks import graph_refused, small_net
from tests.ranks.graph_refused import told_and_trained
from tests.ranks.graph_steps import BODIES, Net
from tests.ranks.small_net import SMALL, assert_equal_bits, on_ranks

pytestmark = pytest.mark.slow(kept=1)  # seconds a case


class Dropping(Net):
    def forward(self, x):
        return super().forward(autograd.dropout(x, 0.5))


class _Doubled(elementwise.ReLU):
    """Its base computes by kernels alone."""

    def forward(self, x):
        return super().forward(x) * x.dtype.type(2)

    def gradients(self, dy, into):
        return (super().gradients(dy, into)[0] * dy.dtype.type(2),)


class WithASubclass(Net):
    def forward(self, x):
        return super().forward(_Doubled()(x))


class Alternates(Net):
    """The Python code does something else every other time."""

    turn = 0

    def forward(self, x):
        self.turn += 1
        y = super().forward(x)
        return y if self.turn % 2 else autograd.relu(y)


class OtherSettings(Net):
    turn = 0

    def forward(self, x):
        self.turn += 1
        self.linear1.relu = bool(self.turn % 2)
        return super().forward(x)


class FromItsArguments(Net):
    def forward(self, x):
        return super().forward(autograd.relu(tensor.Tensor.of(x.array * np.float32(2), x.device)))


class FromBefore(Net):
    """On a result of the step before."""

    last = None

    def forward(self, x):
        x, self.last = x if self.last is None else self.last, autograd.relu(x)
        return super().forward(x)


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = tensor.Tensor((1,))

    def forward(self, x):
        self.seen += 1.0
        return super().forward(x)


class BackwardInside(Net):
    def forward(self, x):
        if self.training:
            for _ in autograd.backward(self.loss(super().forward(x), tensor.from_numpy(np.zeros(len(x.array), int)))):
                pass
        return super().forward(x)


class AsksFromTheSecondOn(Net):
    turn = 0

    def train_one_batch(self, x, y):
        self.turn += 1
        if self.turn > 1:
            self.optimizer.get_states()
        return super().train_one_batch(x, y)


class OtherThreshold(Net):
    """The optimizer gets other arguments each time."""

    turn = 0

    def step(self, loss):
        self.turn += 1
        self.optimizer.reduce_and_update(loss, self.strategy, SMALL + self.turn % 2)


REFUSED = {
    Dropping: "Dropout does not compute by kernels alone",
    WithASubclass: "_Doubled does not compute by kernels alone",
    Alternates: "another number of operations runs",
    OtherSettings: "other settings",
    FromItsArguments: "ReLU has an input that is not an argument, state or result",
    FromBefore: "Conv2d has an input that is not an argument, state or result",
    InPlace: "changed in place",
    BackwardInside: "before the forward pass is complete",
    AsksFromTheSecondOn: "self.optimizer.get_states before the forward pass is complete",
    OtherThreshold: "called with other arguments",
    graph_refused.StepsTwice: "2 times",
    graph_refused.StepsByHand: "0 times",
    graph_refused.AsksBefore: "self.optimizer.stats before the forward pass is complete",
    graph_refused.ComputesLater: "not computed before the optimizer's step",
    graph_refused.ReturnsANumber: "returns a float",
}


def refused(optimizer) -> dict[str, np.ndarray]:
    return told_and_trained(optimizer, REFUSED)


@pytest.mark.sweep(rest=5)
@pytest.mark.parametrize("body", [*BODIES, refused])
@pytest.mark.parametrize("world_size", [1, 2])
def test_replays_give_the_bits_of_steps_without_a_graph(tmp_path, world_size, body):
    ranks = on_ranks(tmp_path, world_size, body)
    for key in ranks[0]:
        if "losses" not in key:
            assert_equal_bits(ranks, key)


def test_an_optimizer_that_leaves_gradients_out_is_not_replayed():
    class First(opt.SGD):
        def __call__(self, loss):
            self.update(*next(autograd.backward(loss)))

    net, rng = small_net.Net(), np.random.default_rng(0)
    net.train_one_batch = lambda x, y: net.optimizer(net.loss(net.forward(x), y))
    net.set_optimizer(First(lr=0.1))
    x, y = tensor.from_numpy(rng.standard_normal((4, 21), np.float32)), tensor.from_numpy(rng.integers(0, 5, 4))
    net.compile([x], is_train=True, use_graph=True)
    before = net.linear1.W.to_numpy()
    for _ in range(5):
        net(x, y)
    assert not net.graph_replays
    np.testing.assert_array_equal(net.linear1.W.to_numpy(), before)
    tensor.from_numpy(np.zeros(1)).device.EnableGraph(False)
