"""Users' optimizers, which define `apply` as in SINGA or distopt's `_apply`: the bits of the rule that is built in."""

import numpy as np
import pytest

from distopt import autograd, opt
from distopt.nn.core.tensor import Tensor
from tests.users_rules import ByApply, ByHook, WithStates, built_in

RULES = [ByApply, WithStates, ByHook]


@pytest.mark.parametrize("make", [*RULES, built_in])
def test_parameters_need_no_name(make, training):
    rule, start = make(0.05), np.float32([[1, -2, 3]])
    twins = [Tensor(data=start * i, stores_grad=True) for i in (1, 2)]
    for _ in range(3):
        rule(autograd.reduce_mean(twins[0] * twins[1], keepdims=True).reshape((1,)))
    first, second, buffers = start.copy(), start * 2, [0.0, 0.0]
    for _ in range(3):
        slopes = second / 3 + 0.01 * first, first / 3 + 0.01 * second
        buffers = [0.5 * buffer + slope for buffer, slope in zip(buffers, slopes, strict=True)]
        first, second = first - 0.05 * buffers[0], second - 0.05 * buffers[1]
    np.testing.assert_allclose(twins[0].array, first, rtol=1e-5)
    np.testing.assert_allclose(twins[1].array, second, rtol=1e-5)


def test_an_update_records_nothing(training):
    """Else `param_value -= ...` would make a new tensor, and leave the parameter as it was."""
    w, g = Tensor(data=np.float32([1, 2]), stores_grad=True, name="w"), Tensor(data=np.float32([1, 1]))
    array = w.array
    ByApply().update(w, g)
    np.testing.assert_allclose(array, np.float32([1, 2]) - 0.05 * (1 + 0.01 * np.float32([1, 2])), rtol=1e-6)
    assert w.creator is None
    assert autograd.training


def test_an_optimizer_without_a_rule_says_what_to_define(training):
    w = Tensor((2,), stores_grad=True)
    bare = opt.Optimizer(0.1)
    for call in (lambda: bare.update(w, Tensor((2,))), lambda: bare.apply("w", w, Tensor((2,)))):
        with pytest.raises(NotImplementedError, match=r"Optimizer has no rule; define apply\(self, param_name"):
            call()
    assert autograd.training


def test_states_of_a_users_optimizer_hold_its_own_too():
    rule, w, g = WithStates(), Tensor(data=np.float32([1, 2]), name="w"), np.float32([1, 3])
    rule.update(w, Tensor(data=g))
    rule.step()
    states = rule.get_states()
    fresh, twin = WithStates(), Tensor(data=w.array, stores_grad=True, name=w.name)
    fresh.set_states({**states, "buffers": {name: buffer.clone() for name, buffer in states["buffers"].items()}})
    for optimizer, param in ((rule, w), (fresh, twin)):
        optimizer.update(param, Tensor(data=g))
    np.testing.assert_array_equal(w.array, twin.array)
    assert fresh.step_counter.item() == 1
