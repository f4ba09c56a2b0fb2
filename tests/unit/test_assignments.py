"""Assignments reach what they are meant for, or say that they would not."""

import numpy as np
import pytest

from distopt import layer, model, opt, tensor
from distopt.codecs import Fp16, Fp32
from distopt.errors import UsageError
from distopt.nn.core.tensor import Tensor
from tests.unit.refusals import refused
from tests.users_rules import ByApply

NO_EFFECT = "so an assignment would have no effect"


def test_attributes_of_the_wrapped_optimizer_are_those_of_distopt():
    rule = opt.SGD(lr=0.5, momentum=0.9)
    dist = opt.DistOpt(rule)
    dist.lr = 0.25
    assert rule.values["lr"] == dist.values["lr"] == dist.lr_value.item() == 0.25
    dist.lr = schedule = opt.CosineDecay(0.5, 10)
    assert dist.lr is rule.lr is schedule
    dist.weight_decay = 0.125
    dist.clip_grad_norm = 3
    dist.step_counter = 5
    assert (rule.values["weight_decay"], rule.clip_grad_norm, rule.step_counter.item()) == (0.125, 3, 5)
    assert (dist.grad_norm, rule.values["lr"]) == (None, 0.25)
    for name, value in (("lr", -1), ("clip_grad_norm", 0), ("momentum", "much")):
        refused(UsageError, name, setattr, dist, name, value)
    for clip in (2.5, None):
        rule = opt.SGD(clip_grad_norm=1.5)
        assert opt.DistOpt(rule, clip_grad_norm=clip).clip_grad_norm == rule.clip_grad_norm == (clip or 1.5)
    users = ByApply()
    dist = opt.DistOpt(users)
    assert dist.buffers is users.buffers
    said = f"DistOpt has no buffers, {NO_EFFECT}; assign to that of the ByApply inside"
    refused(UsageError, said, setattr, dist, "buffers", {})


def test_methods_of_the_wrapped_optimizer_are_not_those_of_distopt_and_a_codec_is_assigned_by_name():
    dist = opt.DistOpt(opt.SGD())
    for name in ("call", "step", "apply"):
        refused(AttributeError, f"it is a method of the wrapped optimizer.*; call opt.{name}$", getattr, dist, name)
        refused(UsageError, f"DistOpt has no {name}, {NO_EFFECT}", setattr, dist, name, print)
    refused(AttributeError, "DistOpt has no syncronize; did you mean synchronize", lambda: dist.syncronize())
    assert dist.codec == Fp32()
    dist.codec = "fp16"
    assert dist.codec == Fp16()
    refused(UsageError, "unknown codec 'fp8'", setattr, dist, "codec", "fp8")
    assert dist.codec == Fp16()


@pytest.mark.parametrize(
    ("make", "name", "cure"),
    [
        (lambda: opt.DistOpt(opt.SGD()), "bucket_element", "did you mean bucket_elements"),
        (lambda: opt.DistOpt(opt.SGD()), "momentun", "did you mean momentum"),
        (lambda: opt.DistOpt(opt.SGD()), "learning_rate", "it has .*clip_grad_norm, .*lr, .*weight_decay"),
        (opt.SGD, "learning_rate", "it has .*lr, .*momentum, "),
        (opt.SGD, "weight_deacy", "did you mean weight_decay"),
        (opt.AdamW, "eps", "did you mean epsilon"),
        (opt.AdamW, "betas", "did you mean beta_"),
        (lambda: initialized(layer.Conv2d(3, 3)), "strides", "did you mean stride"),
        (lambda: initialized(layer.Conv2d(3, 3)), "trainable", "it has .*W, .*padding, "),
    ],
)
def test_a_name_that_nothing_reads_is_refused(make, name, cure):
    thing = make()
    refused(UsageError, rf"{type(thing).__name__} has no {name}, {NO_EFFECT}; {cure}", setattr, thing, name, 0.1)
    assert not hasattr(thing, name)


def initialized(made: layer.Layer) -> layer.Layer:
    made(Tensor((2, 3, 5, 5)))
    return made


class Rule(opt.SGD):
    def __init__(self):
        self.early = 1
        super().__init__(0.1)
        self.history = []


class Dist(opt.DistOpt):
    def __init__(self, rule):
        self.early = 1
        super().__init__(rule)
        self.history = []


class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.linear = layer.Linear(3)

    def forward(self, x):
        self.seen = self.linear(x)
        return self.seen


def test_classes_of_scripts_have_attributes_of_their_own():
    net = Net()
    net.compile([Tensor((2, 3))])
    for thing in (Rule(), Dist(Rule()), net):
        thing.note = "mine"
        assert thing.note == "mine"
    dist = Dist(Rule())
    dist.history.append(1)
    assert (dist.history, dist.opt.history, dist.early) == ([1], [], 1)
    dist.lr = 0.5
    assert dist.opt.values["lr"] == 0.5


def test_a_parameter_is_not_replaced_by_something_that_does_not_train():
    net = Net()
    net.compile([Tensor((2, 3))])
    before = net.linear.W
    for value in (np.zeros((3, 3), np.float32), Tensor((3, 3)), None):
        said = r"linear.W is a parameter, .* by W.copy_from_numpy\(array\)"
        refused(UsageError, said, setattr, net.linear, "W", value)
    assert net.linear.W is before
    net.linear.W = tied = Tensor((3, 3), stores_grad=True)
    assert net.get_params()["linear.W"] is tied
    net.linear.W.copy_from_numpy(np.eye(3, dtype=np.float32))
    np.testing.assert_array_equal(net.forward(tensor.from_numpy(np.eye(3, dtype=np.float32))).array, np.eye(3))
