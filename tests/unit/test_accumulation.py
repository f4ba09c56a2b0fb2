"""`no_sync` and clipping by norm in one process, against PyTorch."""

import math

import numpy as np
import pytest

from distopt import autograd, opt, tensor
from distopt.errors import UsageError
from distopt.nn.core.tensor import Tensor
from tests.ranks.small_net import Net
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


def test_parameters_that_the_last_loss_does_not_reach_are_updated_too(training):
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


def test_a_backward_pass_that_fails_adds_nothing(training):
    w, rule = Tensor(data=np.float32([2, 3]), stores_grad=True, name="w"), opt.SGD(lr=1.0)
    with rule.no_sync():
        with pytest.raises(UsageError, match="a loss has one element"):
            rule(w * 2.0)
        rule(autograd.reduce_sum(w * 2.0, keepdims=False).reshape((1,)))
    rule(autograd.reduce_sum(w, keepdims=False).reshape((1,)))
    np.testing.assert_array_equal(w.array, np.float32([2, 3]) - 3)


def test_states_wait_for_the_update(training):
    w, rule = Tensor(data=np.float32([2]), stores_grad=True, name="w"), opt.SGD(lr=1.0)
    states = rule.get_states()
    with rule.no_sync():
        rule(w * 2.0)
    with pytest.raises(UsageError, match="gradients of no_sync that no update has used yet; save states after"):
        rule.get_states()
    rule.set_states(states)
    rule(w * 1.0)
    assert w.item() == 1, "what was before the states is gone"


@pytest.mark.parametrize("value", [0, -1, math.nan, "1", [1.0]])
def test_a_norm_to_clip_to_is_positive(value):
    with pytest.raises(UsageError, match=r"it must be a number in \(0, inf\]"):
        opt.Adam(clip_grad_norm=value)
    rule = opt.RMSProp(clip_grad_norm=2)
    with pytest.raises(UsageError, match=r"it must be a number in \(0, inf\]"):
        rule.clip_grad_norm = value
    assert rule.clip_grad_norm == 2


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
