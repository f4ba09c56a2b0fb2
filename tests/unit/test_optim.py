"""Optimizers, ours and users', against SINGA's formulas; their states, schedules, and values as scripts see them."""

import numpy as np
import pytest

from distopt import autograd, tensor
from distopt import opt as optim
from distopt.errors import StateError, UsageError
from distopt.nn.core.tensor import Tensor
from tests.unit.nets import copies
from tests.unit.refusals import refused
from tests.users_rules import ByApply, ByHook, WithStates, built_in

FALLING = optim.ExponentialDecay(0.8, 2, 0.5)

# A rule and its options.
CONFIGURATIONS = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd decay": (optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "sgd schedules": (optim.SGD, {"lr": 0.1, "momentum": FALLING, "dampening": FALLING, "weight_decay": FALLING}),
    "nesterov schedules": (optim.SGD, {"lr": FALLING, "momentum": FALLING, "nesterov": True}),
    "adam": (optim.Adam, {"lr": 0.02}),
    "adam all": (optim.Adam, {"lr": 0.02, "beta_1": 0.7, "beta_2": 0.95, "epsilon": 1e-3, "weight_decay": 0.1}),
    "adam schedules": (optim.Adam, {"lr": 0.02, **dict.fromkeys(("beta_1", "beta_2", "epsilon"), FALLING)}),
    "adam decay schedule": (optim.Adam, {"lr": 0.02, "weight_decay": FALLING}),
    "adamw": (optim.AdamW, {"lr": 0.02}),
    "adamw all": (optim.AdamW, {"lr": 0.02, "beta_1": 0.7, "beta_2": 0.95, "epsilon": 1e-3, "weight_decay": 0.3}),
    "adamw schedules": (optim.AdamW, {"lr": FALLING, "beta_1": FALLING, "weight_decay": FALLING}),
    "rmsprop": (optim.RMSProp, {"lr": 0.02, "rho": 0.8}),
    "rmsprop decay": (optim.RMSProp, {"lr": 0.02, "weight_decay": 0.1, "epsilon": 1e-4}),
    "rmsprop schedules": (optim.RMSProp, {"lr": 0.02, "rho": FALLING, "epsilon": FALLING, "weight_decay": FALLING}),
    "adagrad": (optim.AdaGrad, {"lr": 0.1}),
    "adagrad decay": (optim.AdaGrad, {"lr": 0.1, "weight_decay": 0.1, "epsilon": 1e-3}),
    "adagrad schedules": (optim.AdaGrad, {"lr": 0.1, "weight_decay": FALLING, "epsilon": FALLING}),
}
DEFAULTS = {
    optim.SGD: {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False},
    optim.Adam: {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "weight_decay": 0},
    optim.AdamW: {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01},
    optim.RMSProp: {"rho": 0.9, "epsilon": 1e-8, "weight_decay": 0},
    optim.AdaGrad: {"epsilon": 1e-8, "weight_decay": 0},
}

SCHEDULES = [
    (optim.Constant(0.3), [(0, 0.3), (100, 0.3)]),
    (optim.ExponentialDecay(0.8, 10, 0.25), [(0, 0.8), (5, 0.4), (10, 0.2), (25, 0.8 * 0.25**2.5)]),
    (optim.StepDecay(0.8, (3, 5, 5), 0.5), [(0, 0.8), (2, 0.8), (3, 0.4), (4, 0.4), (5, 0.1), (99, 0.1)]),
    (optim.CosineDecay(0.8, 4), [(0, 0.8), (2, 0.4), (4, 0), (9, 0)]),
    (optim.CosineDecay(0.75, 6, 0.25), [(0, 0.75), (2, 0.625), (3, 0.5), (4, 0.375), (6, 0.25)]),
    (optim.LinearWarmUp(0.8, 4, 0.5), [(0, 0.4), (2, 0.6), (4, 0.8), (9, 0.8)]),
    (optim.ExponentialDecay(0.8, 10, 0.25, staircase=True), [(0, 0.8), (9, 0.8), (10, 0.2), (25, 0.05)]),
]

SHOWN = {"lr": "lr_value", "momentum": "mom_value", "dampening": "dam_value", "rho": "rho_value"}
SHOWN |= {"beta_1": "beta_1_value", "beta_2": "beta_2_value", "epsilon": "epsilon_value", "weight_decay": "decay_value"}


def formula(make, options, param, grads):
    """The parameter after steps by the formulas, SINGA's where it has the rule, AdamW as PyTorch's, in float64."""
    first, second = np.zeros_like(param), np.zeros_like(param)
    for step, grad in enumerate(grads):
        at = {key: value(step) if callable(value) else value for key, value in (DEFAULTS[make] | options).items()}
        g = grad
        if make is optim.AdamW:
            param = param * (1 - at["lr"] * at["weight_decay"])
        else:
            g = grad + at["weight_decay"] * param
        if make is optim.SGD and options.get("momentum"):
            first = at["momentum"] * first + (1 - at["dampening"]) * g
            change = g + at["momentum"] * first if at["nesterov"] else first
        elif make is optim.SGD:
            change = g
        elif make in (optim.Adam, optim.AdamW):
            first = at["beta_1"] * first + (1 - at["beta_1"]) * g
            second = at["beta_2"] * second + (1 - at["beta_2"]) * g * g
            mean, square = first / (1 - at["beta_1"] ** (step + 1)), second / (1 - at["beta_2"] ** (step + 1))
            change = mean / (np.sqrt(square) + at["epsilon"])
        else:
            rho = at.get("rho")
            second = second + g * g if rho is None else rho * second + (1 - rho) * g * g
            change = g / np.sqrt(second + at["epsilon"])
        param = param - at["lr"] * change
    return param


def params(dtype=np.float64, like=None):
    rng = np.random.default_rng(0)
    values = like or [rng.standard_normal(shape) for shape in [(7, 3), (5,)]]
    return [Tensor(data=x, dtype=dtype, stores_grad=True, name=f"p{i}") for i, x in enumerate(values)]


def arrays(tensors):
    return [t.array for t in tensors]


def gradients(step, dtype=np.float64, scale=1.0):
    rng = np.random.default_rng(100 + step)
    return [Tensor.of((rng.standard_normal(shape) * scale).astype(dtype)) for shape in [(7, 3), (5,)]]


def run(optimizer, targets, steps, scale=1.0, update=None):
    for step in steps:
        for param, grad in zip(targets, gradients(step, targets[0].dtype, scale), strict=True):
            (update or optimizer.update)(param, grad)
        optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8])  # 1e-4: the epsilon of 1e-8 equals the square
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_steps_equal_the_formulas(name, dtype, scale):
    make, options = CONFIGURATIONS[name]
    targets, optimizer, steps = params(dtype), make(**options), range(5)
    before = [p.to_numpy() for p in targets]
    run(optimizer, targets, steps, scale, lambda param, grad: optimizer.apply(param.name, param, grad))
    for i, (p, start) in enumerate(zip(targets, before, strict=True)):
        grads = [gradients(step, dtype, scale)[i].array.astype(np.float64) for step in steps]
        expected = formula(make, options, start.astype(np.float64), grads)
        near = {"rtol": 3e-5, "atol": 1e-6} if dtype == np.float32 else {"rtol": 1e-12}
        np.testing.assert_allclose(p.array, expected, **near)
        assert p.dtype == dtype


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_states_continue_a_run_to_the_bit(name):
    make, options = CONFIGURATIONS[name]
    options = {**options, "lr": optim.ExponentialDecay(0.1, 2, 0.5)}
    whole, first = params(), params()
    run(make(**options), whole, range(6))
    before = make(**options)
    run(before, first, range(3))
    states = before.get_states()
    kept = copies(states)
    run(before, params(), range(2))  # what was saved is a copy

    fresh, second = make(**options), params(like=first)
    fresh.set_states(states)
    assert fresh.get_states().keys() == kept.keys()
    fresh.attach(second)
    run(fresh, second, range(3, 6))
    np.testing.assert_equal(arrays(second), arrays(whole))

    used, third = make(**options), params(like=first)  # one that knows its parameters already
    run(used, third, [50])
    for p, q in zip(third, first, strict=True):
        p.copy_data(q)
    used.set_states(states)
    run(used, third, range(3, 6))
    np.testing.assert_equal(arrays(third), arrays(whole))
    np.testing.assert_equal(states, kept)


def test_names_tell_parameters_apart_and_states_that_do_not_fit_change_nothing():
    optimizer = optim.Adam(lr=0.1)
    targets = params()
    run(optimizer, targets, range(2))
    good = optimizer.get_states()
    momentum = optim.SGD(momentum=0.9)
    run(momentum, params(), [0])
    foreign = momentum.get_states()
    for states, message in [
        ({}, "step_counter is missing"),
        (foreign, r"parameter p0 are \['momentum'\], where Adam as it is set up has \['m', 'v'\]"),
        ({**good, "p0:m": np.zeros((2, 2))}, r"p0:m is float64 of shape \(7, 3\), .* states float64 of shape \(2, 2\)"),
        ({**good, "p1:v": np.zeros(5, np.float32)}, "p1:v is float64 .* states float32"),
        ({key: value for key, value in good.items() if key != "p1:v"}, r"parameter p1 are \['m'\]"),
    ]:
        refused(StateError, message, optimizer.set_states, states)
    np.testing.assert_equal(optimizer.get_states(), good)
    fresh = optim.Adam(lr=0.1)
    fresh.set_states(good)
    refused(StateError, "p0:m is", fresh.attach, [Tensor((2, 2), name="p0")])
    twins = [Tensor((2,), name="w"), Tensor((2,), name="w")]
    optimizer = optim.RMSProp()
    refused(UsageError, "two parameters are named w", optimizer.attach, twins)
    for param in twins:
        optimizer.update(param, Tensor((2,)))
    refused(UsageError, "parameter w cannot be told apart", optimizer.get_states)


@pytest.mark.parametrize("steps", [3, 4, 6])
@pytest.mark.parametrize("momenta", [(0.9, 0.0, 0.5), (0.0, 0.9, 0.0)])
def test_a_momentum_that_may_change_from_step_to_step_may_change_across_a_save(momenta, steps):
    def trained(saved):
        param, optimizer = Tensor((3,), name="w"), optim.SGD(lr=0.1, momentum=momenta[0])
        for step in range(8):
            momentum = momenta[min(step // 3, 2)]
            if step == saved:
                states = optimizer.get_states()
                optimizer = optim.SGD(lr=0.1, momentum=momentum)
                optimizer.set_states(states)
            optimizer.momentum = momentum
            grad = Tensor((3,))
            grad.array[...] = [step + 1, 1 / (step + 1), -step]
            optimizer.update(param, grad)
            optimizer.step()
        return [param.array, *optimizer.get_states().values()]

    np.testing.assert_equal(trained(steps), trained(None))
    adam = optim.Adam()
    adam.update(Tensor((3,), name="w"), Tensor((3,)))
    refused(StateError, r"\['m', 'v'\], where SGD", lambda: optim.SGD(lr=0.1).set_states(adam.get_states()))


@pytest.mark.parametrize("way", ["__call__", "backward_and_update"])
def test_a_call_is_a_step(training, way):
    w = Tensor(data=np.array([4.0]), stores_grad=True, name="w", dtype=np.float64)
    optimizer = optim.SGD(lr=optim.ExponentialDecay(0.25, 1, 0.5))
    for expected in (3.0, 2.625):  # w -= lr * w
        getattr(optimizer, way)(w * w * 0.5)
        assert w.item() == expected
    assert (optimizer.step_counter.item(), optimizer.values["lr"]) == (2, 0.0625)
    optimizer.call(w * w * 0.5)  # a step that `step` has not counted yet
    assert (w.item(), optimizer.step_counter.item(), optimizer.values["lr"]) == (2.625 - 2.625 / 16, 2, 0.0625)


def test_a_value_that_is_assigned_counts_at_once_and_one_that_makes_no_sense_changes_nothing():
    (w,), (g,) = params()[1:], gradients(0)[1:]
    sgd, start = optim.SGD(0.5), w.to_numpy()
    sgd.update(w, g)
    sgd.lr, sgd.momentum, sgd.weight_decay = 0.25, 0.9, 0.1  # a buffer is needed only now
    sgd.update(w, g)
    expected = start - 0.5 * g.array
    buffer = g.array + 0.1 * expected
    expected -= 0.25 * buffer
    np.testing.assert_allclose(w.array, expected, rtol=1e-12)
    buffer = 0.9 * buffer + g.array + 0.1 * expected
    sgd.update(w, g)
    np.testing.assert_allclose(w.array, expected - 0.25 * buffer, rtol=1e-12)
    kept = dict(sgd.values)
    for name, value, message in (
        ("lr", -1, r"lr is -1; it must be a number in \[0, inf\)"),
        ("weight_decay", float("nan"), "weight_decay is nan; it must be a number"),
        ("momentum", "much", "momentum is a number or a DecayScheduler, not 'much'"),
        ("dampening", None, "dampening is a number or a DecayScheduler, not None"),
    ):
        refused(UsageError, message, setattr, sgd, name, value)
    assert sgd.values == kept
    assert sgd.momentum.init_value == 0.9


@pytest.mark.parametrize(("schedule", "points"), SCHEDULES)
def test_a_schedule_gives_a_number_for_a_number_and_a_tensor_for_a_tensor(schedule, points):
    for step, expected in points:
        assert schedule(step) == pytest.approx(expected, rel=1e-15)
        assert schedule(float(step)) == schedule(np.int64(step)) == schedule(step)
        for call in (schedule, schedule.call):
            value = call(Tensor(data=np.float32([step])))
            assert (value.dtype, value.array.tolist()) == (np.float32, [np.float32(expected)])


def test_the_ends_of_schedules_and_what_they_want():
    cosine = optim.CosineDecay(0.7, 14, 0.05)
    assert [cosine(14), cosine(1000)] == [0.05, 0.05]
    warm_up = optim.LinearWarmUp(BySinga(0.5), 4, 0)
    assert [warm_up(step) for step in (0, 1, 2, 4, 5)] == [0, 0.125, 0.25, 0.5, 0.25]
    error = r"DecayScheduler has no value; define call\(self, step\)"
    refused(NotImplementedError, error, lambda: optim.SGD(lr=optim.DecayScheduler(0.1)))


class BySinga(optim.DecayScheduler):
    """As SINGA's own: a tensor of one element in, such a tensor out."""

    def call(self, step):
        assert (step.shape, step.dtype) == ((1,), np.float32)
        return Tensor((1,), step.device, tensor.float32, data=np.float32([self.init_value])) / (step + 1.0)


class WithANumber(optim.DecayScheduler):
    def call(self, step):
        return self.init_value / (1.0 + tensor.to_numpy(step)[0])


class ByCall(optim.DecayScheduler):
    table = (0.5, 0.25, 0.5 / 3)

    def __call__(self, step):
        return self.table[step]


@pytest.mark.parametrize("make", [BySinga, WithANumber, ByCall])
def test_users_schedules(make):
    sgd = optim.SGD(lr=make(0.5), momentum=make(0.5), dampening=make(0.5), weight_decay=make(0.5))
    for step in range(3):
        np.testing.assert_allclose(list(sgd.values.values()), [0.5 / (step + 1)] * 4, rtol=1e-7)
        if step < 2:
            sgd.step()
    if make is not ByCall:
        assert make(0.5)(1) == make(0.5)(Tensor(data=np.float32([1]))).item() == 0.25


@pytest.mark.parametrize("value", [None, "fast", [0.1, 0.2], Tensor((2,))])
def test_a_schedule_that_gives_no_number_is_an_error_and_the_step_is_not_counted(value):
    class Broken(optim.DecayScheduler):
        def call(self, step):
            return value if step.item() else 0.1

    sgd = optim.SGD(lr=Broken(0.1), momentum=optim.ExponentialDecay(0.9, 1, 0.5))
    refused(UsageError, "is neither a number nor a tensor of one element", sgd.step)
    assert (sgd.step_counter.item(), sgd.values["lr"], sgd.values["momentum"]) == (0, 0.1, 0.9)


@pytest.mark.parametrize("make", [optim.SGD, optim.RMSProp, optim.AdaGrad, optim.Adam])
def test_hyperparameters_as_singa_s_scripts_see_them(make):
    names = ["lr", *(name for name in DEFAULTS[make] if name in SHOWN)]
    schedules = {name: optim.ExponentialDecay(0.5 + i / 16, 1, 0.5) for i, name in enumerate(names)}
    optimizer = make(*schedules.values()) if make is not optim.SGD else make(**schedules)
    optimizer.step()
    for i, name in enumerate(names):
        value = SHOWN[name]
        assert getattr(optimizer, name) is schedules[name]
        shown = getattr(optimizer, value)
        np.testing.assert_array_equal(tensor.to_numpy(shown), np.float32([(0.5 + i / 16) / 2]))
        refused(ValueError, "read-only", shown.set_value, 1.0)
        for new in (0.125, Tensor(data=np.float32([0.125]))):
            setattr(optimizer, value, new)
            assert optimizer.values[name] == getattr(optimizer, value).item() == 0.125
        optimizer.step_counter = 1
        assert optimizer.values[name] == (0.5 + i / 16) / 2, "only until the next step"
        setattr(optimizer, name, 0.25)
        assert (getattr(optimizer, name).init_value, optimizer.values[name]) == (0.25, 0.25)


def test_states_of_singas_scripts_and_of_the_rules_by_name():
    first = optim.Optimizer(optim.ExponentialDecay(0.5, 1, 0.5))
    first.step()
    first.step()
    assert first.get_states()["step_counter"] == 2
    for states in ({"step_counter": 5}, {"step_counter": 5.0}, {"step_counter": np.float32(5)}):
        first.set_states(states)
        np.testing.assert_array_equal(tensor.to_numpy(first.step_counter), [5])
        assert first.lr_value.item() == 0.5**6
    first.step_counter = Tensor(data=np.float32([3]))
    assert (first.step_counter.item(), first.values["lr"]) == (3, 0.5**4)
    w, g = Tensor(data=np.float32([1, 2]), name="w"), Tensor(data=np.float32([0.5, -1]))
    sgd, adam = optim.SGD(0.1, 0.9), optim.Adam()
    for rule in (sgd, adam):
        rule.update(w, g)
    np.testing.assert_array_equal(tensor.to_numpy(sgd.moments["w"]), g.array)
    np.testing.assert_allclose(adam.m["w"].array, 0.1 * g.array, rtol=1e-6)
    np.testing.assert_allclose(adam.v["w"].array, 0.001 * g.array**2, rtol=1e-6)
    for rule, name in ((optim.RMSProp(rho=0.75), "running_average"), (optim.AdaGrad(), "history")):
        rule.update(w, g)
        state = getattr(rule, name)["w"]
        np.testing.assert_allclose(state.array, g.array**2 * (0.25 if name == "running_average" else 1), rtol=1e-6)
        state.set_value(0)
        assert not rule.get_states()[f"w:{rule.slots[0]}"].any(), "it shares the memory"
    assert optim.SGD().moments == {}


@pytest.mark.parametrize("make", [ByApply, WithStates, ByHook, built_in])
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
    np.testing.assert_allclose(arrays(twins), [first, second], rtol=1e-5)


def test_updates_record_nothing_and_need_a_rule(training):
    # Else `param_value -= ...` would make a new tensor, and leave the parameter as it was.
    w, g = Tensor(data=np.float32([1, 2]), stores_grad=True, name="w"), Tensor(data=np.float32([1, 1]))
    array = w.array
    ByApply().update(w, g)
    np.testing.assert_allclose(array, np.float32([1, 2]) - 0.05 * (1 + 0.01 * np.float32([1, 2])), rtol=1e-6)
    assert w.creator is None
    assert autograd.training
    w = Tensor((2,), stores_grad=True)
    bare = optim.Optimizer(0.1)
    for call in (lambda: bare.update(w, Tensor((2,))), lambda: bare.apply("w", w, Tensor((2,)))):
        refused(NotImplementedError, r"Optimizer has no rule; define apply\(self, param_name", call)
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
