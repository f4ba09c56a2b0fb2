"""Schedules of numbers and of tensors, ours and users'; hyperparameters as SINGA's scripts see them."""

import numpy as np
import pytest

from distopt import opt, tensor
from distopt.errors import UsageError
from distopt.nn.core.tensor import Tensor


def step_tensor(step):
    return Tensor(data=np.float32([step]))


STAIRS = opt.ExponentialDecay(0.8, 10, 0.25, staircase=True)
SMOOTH = opt.ExponentialDecay(0.8, 10, 0.25)
CASES = [
    (opt.Constant(0.3), [(0, 0.3), (100, 0.3)]),
    (SMOOTH, [(0, 0.8), (5, 0.4), (10, 0.2), (25, 0.8 * 0.25**2.5)]),
    (opt.StepDecay(0.8, (3, 5, 5), 0.5), [(0, 0.8), (2, 0.8), (3, 0.4), (4, 0.4), (5, 0.1), (99, 0.1)]),
    (opt.CosineDecay(0.8, 4), [(0, 0.8), (2, 0.4), (4, 0), (9, 0)]),
    (opt.CosineDecay(0.75, 6, 0.25), [(0, 0.75), (2, 0.625), (3, 0.5), (4, 0.375), (6, 0.25)]),
    (opt.LinearWarmUp(0.8, 4, 0.5), [(0, 0.4), (2, 0.6), (4, 0.8), (9, 0.8)]),
    (STAIRS, [(0, 0.8), (9, 0.8), (10, 0.2), (25, 0.05)]),
]


@pytest.mark.parametrize(("schedule", "points"), CASES)
def test_a_schedule_gives_a_number_for_a_number_and_a_tensor_for_a_tensor(schedule, points):
    for step, expected in points:
        assert schedule(step) == pytest.approx(expected, rel=1e-15)
        assert schedule(float(step)) == schedule(np.int64(step)) == schedule(step)
        for call in (schedule, schedule.call):
            value = call(step_tensor(step))
            assert (value.shape, value.dtype) == ((1,), np.float32)
            np.testing.assert_array_equal(value.array, np.float32([expected]))


def test_the_ends_of_schedules():
    cosine = opt.CosineDecay(0.7, 14, 0.05)
    assert [cosine(14), cosine(1000)] == [0.05, 0.05]
    warm_up = opt.LinearWarmUp(BySinga(0.5), 4, 0)
    assert [warm_up(step) for step in (0, 1, 2, 4, 5)] == [0, 0.125, 0.25, 0.5, 0.25]


class BySinga(opt.DecayScheduler):
    """As SINGA's own: a tensor of one element in, such a tensor out."""

    def call(self, step):
        assert (step.shape, step.dtype) == ((1,), np.float32)
        return Tensor((1,), step.device, tensor.float32, data=np.float32([self.init_value])) / (step + 1.0)


class WithANumber(opt.DecayScheduler):
    def call(self, step):
        return self.init_value / (1.0 + tensor.to_numpy(step)[0])


class ByCall(opt.DecayScheduler):
    table = (0.5, 0.25, 0.5 / 3)

    def __call__(self, step):
        return self.table[step]


@pytest.mark.parametrize("make", [BySinga, WithANumber, ByCall])
def test_users_schedules(make):
    sgd = opt.SGD(lr=make(0.5), momentum=make(0.5), dampening=make(0.5), weight_decay=make(0.5))
    for step in range(3):
        np.testing.assert_allclose(list(sgd.values.values()), [0.5 / (step + 1)] * 4, rtol=1e-7)
        if step < 2:
            sgd.step()
    if make is not ByCall:
        assert make(0.5)(1) == 0.25
        assert make(0.5)(step_tensor(1)).item() == 0.25


@pytest.mark.parametrize("value", [None, "fast", [0.1, 0.2], Tensor((2,))])
def test_a_schedule_that_gives_no_number_is_an_error_and_the_step_is_not_counted(value):
    class Broken(opt.DecayScheduler):
        def call(self, step):
            return value if step.item() else 0.1

    sgd = opt.SGD(lr=Broken(0.1), momentum=opt.ExponentialDecay(0.9, 1, 0.5))
    with pytest.raises(UsageError, match="is neither a number nor a tensor of one element"):
        sgd.step()
    assert (sgd.step_counter.item(), sgd.values["lr"], sgd.values["momentum"]) == (0, 0.1, 0.9)


def test_a_step_decay_wants_its_steps():
    with pytest.raises(UsageError, match=r"milestones are steps, as \[30, 60\], not 30; for intervals: Exponential"):
        opt.StepDecay(0.1, 30)


def test_a_schedule_without_a_rule_says_what_to_define():
    with pytest.raises(NotImplementedError, match=r"DecayScheduler has no value; define call\(self, step\)"):
        opt.SGD(lr=opt.DecayScheduler(0.1))


VALUES = {
    opt.SGD: {"lr": "lr_value", "momentum": "mom_value", "dampening": "dam_value", "weight_decay": "decay_value"},
    opt.RMSProp: {"lr": "lr_value", "rho": "rho_value", "epsilon": "epsilon_value", "weight_decay": "decay_value"},
    opt.AdaGrad: {"lr": "lr_value", "epsilon": "epsilon_value", "weight_decay": "decay_value"},
    opt.Adam: {
        "lr": "lr_value",
        "beta_1": "beta_1_value",
        "beta_2": "beta_2_value",
        "epsilon": "epsilon_value",
        "weight_decay": "decay_value",
    },
}


@pytest.mark.parametrize("make", VALUES)
def test_hyperparameters_as_singa_s_scripts_see_them(make):
    schedules = {name: opt.ExponentialDecay(0.5 + i / 16, 1, 0.5) for i, name in enumerate(VALUES[make])}
    optimizer = make(*schedules.values()) if make is not opt.SGD else make(**schedules)
    optimizer.step()
    for i, (name, value) in enumerate(VALUES[make].items()):
        assert getattr(optimizer, name) is schedules[name]
        shown = getattr(optimizer, value)
        np.testing.assert_array_equal(tensor.to_numpy(shown), np.float32([(0.5 + i / 16) / 2]))
        with pytest.raises(ValueError, match="read-only"):
            shown.set_value(1.0)  # it is a copy, so this would have no effect
        for new in (0.125, Tensor(data=np.float32([0.125]))):
            setattr(optimizer, value, new)
            assert optimizer.values[name] == getattr(optimizer, value).item() == 0.125
        optimizer.step_counter = 1
        assert optimizer.values[name] == (0.5 + i / 16) / 2, "only until the next step"
        setattr(optimizer, name, 0.25)
        assert (getattr(optimizer, name).init_value, optimizer.values[name]) == (0.25, 0.25)


def test_states_of_singa_s_scripts():
    first = opt.Optimizer(opt.ExponentialDecay(0.5, 1, 0.5))
    first.step()
    first.step()
    assert first.get_states()["step_counter"] == 2
    for states in ({"step_counter": 5}, {"step_counter": 5.0}, {"step_counter": np.float32(5)}):
        first.set_states(states)
        np.testing.assert_array_equal(tensor.to_numpy(first.step_counter), [5])
        assert first.lr_value.item() == 0.5**6
    first.step_counter = step_tensor(3)
    assert (first.step_counter.item(), first.values["lr"]) == (3, 0.5**4)


def test_states_of_the_rules_by_name():
    w, g = Tensor(data=np.float32([1, 2]), name="w"), Tensor(data=np.float32([0.5, -1]))
    sgd, adam = opt.SGD(0.1, 0.9), opt.Adam()
    for rule in (sgd, adam):
        rule.update(w, g)
    np.testing.assert_array_equal(tensor.to_numpy(sgd.moments["w"]), g.array)
    np.testing.assert_allclose(adam.m["w"].array, 0.1 * g.array, rtol=1e-6)
    np.testing.assert_allclose(adam.v["w"].array, 0.001 * g.array**2, rtol=1e-6)
    for rule, name in ((opt.RMSProp(rho=0.75), "running_average"), (opt.AdaGrad(), "history")):
        rule.update(w, g)
        state = getattr(rule, name)["w"]
        np.testing.assert_allclose(state.array, g.array**2 * (0.25 if name == "running_average" else 1), rtol=1e-6)
        state.set_value(0)
        assert not rule.get_states()[f"w:{rule.slots[0]}"].any(), "it shares the memory"
    assert opt.SGD().moments == {}
