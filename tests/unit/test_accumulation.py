"""`no_sync`, clipping by norm and frozen parameters in one process, against PyTorch."""

import math
from functools import partial

import numpy as np
import pytest

from distopt import autograd, layer, opt, tensor
from distopt.errors import UsageError
from distopt.nn.core.tensor import Tensor
from distopt.nn.ops import matrix
from tests.ranks.small_net import Net
from tests.unit.nets import Chain
from tests.unit.refusals import refused
from tests.users_rules import ByApply

FEATURES, HIDDEN, CLASSES = 11, 7, 5
PARTS = (3, 1, 4)  # batches of each update: the first of them lie inside no_sync


def batch(number: int, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    return rng.standard_normal((size, FEATURES), np.float32), rng.integers(0, CLASSES, size)


def tensors(number: int, size: int = 6) -> tuple[Tensor, Tensor]:
    return tuple(map(tensor.from_numpy, batch(number, size)))


def build(rule, **options) -> Net:
    net = Net(HIDDEN, CLASSES)
    x, _ = tensors(0)
    x.device.SetRandSeed(5)
    net.set_optimizer(rule)
    net.compile([x], is_train=True, **options)
    return net


def updates(rule, net: Net, parts=PARTS):
    """After each update."""
    number = 0
    for count in parts:

        def step(loss, share=1 / count):
            rule(loss * share)

        with rule.no_sync():
            for _ in range(count - 1):
                net(*tensors(number), step)
                number += 1
        net(*tensors(number), step)
        number += 1
        yield {name: param.to_numpy() for name, param in net.get_params().items()}


class Twin:
    """The same training by PyTorch."""

    def __init__(self, net: Net, make, max_norm: float | None = None) -> None:
        self.torch = pytest.importorskip("torch", reason="PyTorch is the oracle; pip install torch==2.13.0")
        self.params = {
            name: self.torch.nn.Parameter(self.torch.from_numpy(param.to_numpy()))
            for name, param in net.get_params().items()
        }
        self.rule = make(self.torch.optim, list(self.params.values()))
        self.max_norm, self.norm = max_norm, None

    def updates(self, parts=PARTS):
        number = 0
        for count in parts:
            self.rule.zero_grad()
            for _ in range(count):
                x, y = map(self.torch.from_numpy, batch(number))
                hidden = self.torch.relu(x @ self.params["linear1.W"] + self.params["linear1.b"])
                out = hidden @ self.params["linear2.W"] + self.params["linear2.b"]
                (self.torch.nn.functional.cross_entropy(out, y) / count).backward()
                number += 1
            if self.max_norm is not None:
                self.norm = self.torch.nn.utils.clip_grad_norm_(self.params.values(), self.max_norm).item()
            self.rule.step()
            yield {name: param.detach().numpy().copy() for name, param in self.params.items()}


RULES = {
    "sgd": (lambda: opt.SGD(lr=0.3, momentum=0.9), lambda o, p: o.SGD(p, lr=0.3, momentum=0.9)),
    "adamw": (lambda: opt.AdamW(lr=0.05), lambda o, p: o.AdamW(p, lr=0.05)),
    "users": (ByApply, lambda o, p: o.SGD(p, lr=0.05, momentum=0.5, weight_decay=0.01)),
}


@pytest.mark.parametrize("max_norm", [None, 0.3, math.inf])
@pytest.mark.parametrize("name", RULES)
def test_accumulated_and_clipped_updates_are_those_of_pytorch(name, max_norm):
    ours, theirs = RULES[name]
    rule = ours()
    rule.clip_grad_norm = max_norm
    net = build(rule)
    twin = Twin(net, theirs, max_norm)
    for own, expected in zip(updates(rule, net), twin.updates(), strict=True):
        for key, array in expected.items():
            np.testing.assert_allclose(own[key], array, rtol=2e-4, atol=2e-6, err_msg=key)
        assert rule.grad_norm == (None if max_norm is None else pytest.approx(twin.norm, rel=1e-5))
        assert max_norm != 0.3 or rule.grad_norm > max_norm, "it was clipped"
    assert rule.step_counter.item() == len(PARTS), "a step is an update"


def test_sums_of_no_sync_wait_for_the_update_of_all_that_any_loss_reached(training):
    a, b = (Tensor(data=np.float32([value]), stores_grad=True, name=name) for name, value in (("a", 2), ("b", 3)))
    rule = opt.SGD(lr=1.0)
    with rule.no_sync():
        rule.backward_and_update(a * 4.0)
        with rule.no_sync():
            rule(a * b)
        rule(a * 0.5)
    assert (a.item(), b.item()) == (2, 3)
    rule(b * 1.0)
    assert (a.item(), b.item()) == (2 - 4 - 3 - 0.5, 3 - 2 - 1)
    rule(b * 1.0)
    assert (a.item(), b.item()) == (-5.5, -1), "nothing is left"
    w, rule = Tensor(data=np.float32([2, 3]), stores_grad=True, name="w"), opt.SGD(lr=1.0)
    with rule.no_sync():
        refused(UsageError, "a loss has one element", lambda: rule(w * 2.0))
        rule(autograd.reduce_sum(w * 2.0, keepdims=False).reshape((1,)))
    rule(autograd.reduce_sum(w, keepdims=False).reshape((1,)))
    np.testing.assert_array_equal(w.array, np.float32([2, 3]) - 3)
    w, rule = Tensor(data=np.float32([2]), stores_grad=True, name="w"), opt.SGD(lr=1.0)
    states = rule.get_states()
    with rule.no_sync():
        rule(w * 2.0)
    refused(UsageError, "gradients of no_sync that no update has used yet; save states after", rule.get_states)
    rule.set_states(states)
    rule(w * 1.0)
    assert w.item() == 1, "what was before the states is gone"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("special", [0.0, math.nan])
def test_norms_of_all_types_and_values_are_those_of_pytorch(dtype, special):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle; pip install torch==2.13.0")
    rng = np.random.default_rng(0)
    ours = [rng.standard_normal(size).astype(dtype) for size in (33, 1, 700)]
    ours[2][699] = special
    theirs = [torch.nn.Parameter(torch.zeros(array.size, dtype=torch.from_numpy(array).dtype)) for array in ours]
    for param, array in zip(theirs, ours, strict=True):
        param.grad = torch.from_numpy(array.copy())
    rule = opt.SGD(clip_grad_norm=1.5)
    rule.clip_gradients(ours)
    assert rule.grad_norm == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, 1.5).item(), rel=1e-6, nan_ok=True)
    for param, array in zip(theirs, ours, strict=True):
        assert array.dtype == dtype
        np.testing.assert_allclose(array, param.grad.numpy(), rtol=2e-6)


sgd = partial(opt.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)
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


def test_a_layer_tells_whether_it_trains_and_what_cannot_be_frozen_or_trained():
    net = build(sgd())
    assert net.requires_grad
    net.requires_grad = False
    assert not net.linear1.requires_grad
    net.linear2.b.requires_grad = True
    assert (net.requires_grad, net.linear2.requires_grad, net.linear1.requires_grad) == (True, True, False)
    net.requires_grad = True
    assert all(param.requires_grad for param in net.get_params().values())
    said = "Conv2d has no parameters yet; compile the model before it is frozen"
    refused(UsageError, said, setattr, layer.Conv2d(3, 3), "requires_grad", False)
    net = build(sgd())
    net.requires_grad = False
    before = [param.to_numpy() for param in net.get_params().values()]
    refused(UsageError, "no parameter behind this tensor trains; set requires_grad of one to True", net, *tensors(0))
    for param, array in zip(net.get_params().values(), before, strict=True):
        np.testing.assert_array_equal(param.array, array)


def images_net() -> Chain:
    """Layers whose kernels compute all their gradients at once."""
    return Chain(
        conv=layer.Conv2d(8, 3, activation="RELU"),
        norm=layer.BatchNorm2d(),
        winograd=layer.Conv2d(8, 3, padding=1),
        pooled=layer.Conv2d(8, 3, padding=1, activation="RELU", pool=layer.MaxPool2d(2, 2)),
        grouped=layer.Conv2d(4, 3, padding=1, group=2),
        separable=layer.SeparableConv2d(3, 3),
        flatten=layer.Flatten(),
        linear=layer.Linear(5),
    )


FROZEN = ["conv", "conv.W", "norm", "norm.scale", "winograd", "pooled", "pooled.b", "grouped", "separable", "linear.W"]


@pytest.mark.parametrize("frozen", FROZEN)
def test_gradients_of_the_others_are_the_same(frozen):
    """To the bit: what is below a frozen layer gets the gradients that it would get otherwise."""
    found, rng = [], np.random.default_rng(1)
    x = tensor.from_numpy(rng.standard_normal((6, 2, 12, 12), np.float32))
    y = tensor.from_numpy(rng.integers(0, 5, 6))
    for freeze in (False, True):
        net = images_net()
        x.device.SetRandSeed(4)
        net.set_optimizer(opt.SGD(lr=0.1))
        net.compile([x], is_train=True)
        for name, param in net.get_params().items():
            param.requires_grad = not (freeze and name.startswith(frozen))
        found.append({param.name: grad.to_numpy() for param, grad in autograd.backward(net.loss(net.forward(x), y))})
        assert not np.array_equal(net.norm.running_mean.to_numpy(), np.zeros(8)), "as in PyTorch"
    whole, some = found
    assert {name for name in whole if name.startswith(frozen)} == whole.keys() - some.keys() != set()
    for name, grad in some.items():
        np.testing.assert_array_equal(grad, whole[name])


def test_frozen_parameters_are_left_out_of_sums_and_of_operations_walked_by_hand(training):
    a, b = (Tensor(data=np.float32([value]), stores_grad=True, name=name) for name, value in (("a", 2), ("b", 3)))
    rule = opt.SGD(lr=1.0)
    with rule.no_sync():
        rule(a * b)
    b.requires_grad = False
    rule(a * 1.0)
    assert (a.item(), b.item()) == (2 - 3 - 1, 3)
    assert rule.get_states()
    x, _ = batch(0)
    made = layer.Linear(5)
    out = made(tensor.from_numpy(x))
    made.W.requires_grad = False
    dx, db = out.creator.backward(np.ones_like(out.array))
    assert (dx.shape(), db.shape()) == (x.shape, (5,))
