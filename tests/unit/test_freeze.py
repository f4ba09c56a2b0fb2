"""Frozen parameters in one process, against PyTorch."""

import numpy as np
import pytest

from distopt import autograd, layer, model, opt, tensor
from distopt.errors import UsageError
from distopt.nn.core.tensor import Tensor
from distopt.nn.ops import matrix
from tests.unit.test_accumulation import Twin, batch, build, tensors


def sgd() -> opt.SGD:
    return opt.SGD(lr=0.3, momentum=0.9, weight_decay=0.1)


# After how many steps which parameters train.
PHASES = {0: "all", 2: "linear2", 4: "linear1.W", 6: "linear1", 8: "all"}


def set_training(params, which: str) -> None:
    for name, param in params.items():
        param.requires_grad = which == "all" or name.startswith(which)


def test_frozen_parameters_stay_and_the_others_train_as_in_pytorch():
    net = build(sgd())
    twin = Twin(net, lambda o, p: o.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.1))
    params = net.get_params()
    theirs = twin.updates([1] * 10)
    for number in range(10):
        if number in PHASES:
            set_training(params, PHASES[number])
            set_training(twin.params, PHASES[number])
        before = {name: param.to_numpy() for name, param in params.items()}
        net(*tensors(number))
        for name, expected in next(theirs).items():
            if not params[name].requires_grad:
                np.testing.assert_array_equal(params[name].array, before[name])
            np.testing.assert_allclose(params[name].array, expected, rtol=1e-4, atol=1e-6, err_msg=name)
    assert net.get_states().keys() >= {"linear1.W", "linear1.b", "linear2.W", "linear2.b"}


def test_nothing_is_computed_for_frozen_layers_at_the_bottom(monkeypatch):
    walked = []
    gradients = matrix.Linear.gradients
    monkeypatch.setattr(matrix.Linear, "gradients", lambda op, *args: walked.append(op.needs) or gradients(op, *args))
    net = build(sgd())
    net(*tensors(0))
    assert walked == [(True, True, True), (False, True, True)]
    walked.clear()
    net.linear1.requires_grad = False
    net.linear2.b.requires_grad = False
    net(*tensors(1))
    assert walked == [(False, True, False)]


def test_a_layer_tells_whether_it_trains_and_frees_all_below():
    net = build(sgd())
    assert net.requires_grad
    net.requires_grad = False
    assert not net.linear1.requires_grad
    net.linear2.b.requires_grad = True
    assert (net.requires_grad, net.linear2.requires_grad, net.linear1.requires_grad) == (True, True, False)
    net.requires_grad = True
    assert all(param.requires_grad for param in net.get_params().values())


def test_what_cannot_be_frozen_or_trained_is_said():
    with pytest.raises(UsageError, match="Conv2d has no parameters yet; compile the model before it is frozen"):
        layer.Conv2d(3, 3).requires_grad = False
    net = build(sgd())
    net.requires_grad = False
    before = [param.to_numpy() for param in net.get_params().values()]
    with pytest.raises(UsageError, match="no parameter behind this tensor trains; set requires_grad of one to True"):
        net(*tensors(0))
    for param, array in zip(net.get_params().values(), before, strict=True):
        np.testing.assert_array_equal(param.array, array)


class Images(model.Model):
    """Layers whose kernels compute all their gradients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(8, 3, activation="RELU")
        self.norm = layer.BatchNorm2d()
        self.winograd = layer.Conv2d(8, 3, padding=1)
        self.pooled = layer.Conv2d(8, 3, padding=1, activation="RELU", pool=layer.MaxPool2d(2, 2))
        self.grouped = layer.Conv2d(4, 3, padding=1, group=2)
        self.separable = layer.SeparableConv2d(3, 3)
        self.flatten = layer.Flatten()
        self.linear = layer.Linear(5)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        y = self.grouped(self.pooled(self.winograd(self.norm(self.conv(x)))))
        return self.linear(self.flatten(self.separable(y)))

    def train_one_batch(self, x, y):
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def images(number: int):
    rng = np.random.default_rng(number)
    x, y = rng.standard_normal((6, 2, 12, 12), np.float32), rng.integers(0, 5, 6)
    return tensor.from_numpy(x), tensor.from_numpy(y)


FROZEN = ["conv", "conv.W", "norm", "norm.scale", "winograd", "pooled", "pooled.b", "grouped", "separable", "linear.W"]


@pytest.mark.parametrize("frozen", FROZEN)
def test_gradients_of_the_others_are_the_same(frozen):
    """To the bit: what is below a frozen layer gets the gradients that it would get otherwise."""
    found = []
    for freeze in (False, True):
        net, (x, y) = Images(), images(1)
        x.device.SetRandSeed(4)
        net.set_optimizer(opt.SGD(lr=0.1))
        net.compile([x], is_train=True)
        for name, param in net.get_params().items():
            param.requires_grad = not (freeze and name.startswith(frozen))
        loss = net.loss(net.forward(x), y)
        found.append({param.name: grad.to_numpy() for param, grad in autograd.backward(loss)})
        assert not np.array_equal(net.norm.running_mean.to_numpy(), np.zeros(8)), "as in PyTorch"
    whole, some = found
    assert {name for name in whole if name.startswith(frozen)} == whole.keys() - some.keys() != set()
    for name, grad in some.items():
        np.testing.assert_array_equal(grad, whole[name])


def test_sums_of_no_sync_are_dropped_for_parameters_that_are_frozen_since(training):
    a, b = (Tensor(data=np.float32([value]), stores_grad=True, name=name) for name, value in (("a", 2), ("b", 3)))
    rule = opt.SGD(lr=1.0)
    with rule.no_sync():
        rule(a * b)
    b.requires_grad = False
    rule(a * 1.0)
    assert (a.item(), b.item()) == (2 - 3 - 1, 3)
    assert rule.get_states()


def test_an_operation_walked_by_hand_leaves_frozen_parameters_out(training):
    x, _ = batch(0)
    made = layer.Linear(5)
    out = made(tensor.from_numpy(x))
    made.W.requires_grad = False
    dx, db = out.creator.backward(np.ones_like(out.array))
    assert (dx.shape(), db.shape()) == (x.shape, (5,))
