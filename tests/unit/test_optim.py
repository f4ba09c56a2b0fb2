"""Optimizers against SINGA's formulas; their states."""

import numpy as np
import pytest

from distopt import opt as optim
from distopt.errors import StateError, UsageError
from distopt.nn.core.tensor import Tensor
from distopt.nn.optim.schedules import ExponentialDecay

FALLING = ExponentialDecay(0.8, 2, 0.5)

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


def params(dtype=np.float64):
    rng = np.random.default_rng(0)
    return [
        Tensor(data=rng.standard_normal(shape), dtype=dtype, stores_grad=True, name=f"p{i}")
        for i, shape in enumerate([(7, 3), (5,)])
    ]


def copies(given):
    made = params()
    for p, q in zip(made, given, strict=True):
        p.copy_data(q)
    return made


def gradients(step, dtype=np.float64, scale=1.0):
    rng = np.random.default_rng(100 + step)
    return [Tensor.of((rng.standard_normal(shape) * scale).astype(dtype)) for shape in [(7, 3), (5,)]]


def run(optimizer, targets, steps):
    for step in steps:
        for param, grad in zip(targets, gradients(step, targets[0].dtype), strict=True):
            optimizer.update(param, grad)
        optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8])  # 1e-4: the epsilon of 1e-8 equals the square
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_steps_equal_the_formulas(name, dtype, scale):
    make, options = CONFIGURATIONS[name]
    targets, optimizer, steps = params(dtype), make(**options), range(5)
    before = [p.to_numpy() for p in targets]
    for step in steps:
        for param, grad in zip(targets, gradients(step, dtype, scale), strict=True):
            optimizer.apply(param.name, param, grad)
        optimizer.step()
    for i, (p, start) in enumerate(zip(targets, before, strict=True)):
        grads = [gradients(step, dtype, scale)[i].array.astype(np.float64) for step in steps]
        expected = formula(make, options, start.astype(np.float64), grads)
        near = {"rtol": 3e-5, "atol": 1e-6} if dtype == np.float32 else {"rtol": 1e-12}
        np.testing.assert_allclose(p.array, expected, **near)
        assert p.dtype == dtype


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_states_continue_a_run_to_the_bit(name):
    make, options = CONFIGURATIONS[name]
    options = {**options, "lr": ExponentialDecay(0.1, 2, 0.5)}
    whole, first = params(), params()
    run(make(**options), whole, range(6))
    before = make(**options)
    run(before, first, range(3))
    states = before.get_states()
    kept = {key: array.copy() for key, array in states.items()}
    run(before, params(), range(2))  # what was saved is a copy

    fresh = make(**options)
    fresh.set_states(states)
    assert fresh.get_states().keys() == kept.keys()
    second = copies(first)
    fresh.attach(second)
    run(fresh, second, range(3, 6))
    for p, q in zip(whole, second, strict=True):
        np.testing.assert_array_equal(p.array, q.array)

    used = make(**options)  # one that knows its parameters already
    third = copies(first)
    run(used, third, [50])
    for p, q in zip(third, first, strict=True):
        p.copy_data(q)
    used.set_states(states)
    run(used, third, range(3, 6))
    for p, q in zip(whole, third, strict=True):
        np.testing.assert_array_equal(p.array, q.array)
    for key, array in states.items():
        np.testing.assert_array_equal(array, kept[key])


def test_states_that_do_not_fit_change_nothing():
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
        (
            {**good, "p0:m": np.zeros((2, 2))},
            r"p0:m is float64 of shape \(7, 3\), that of the states float64 of shape \(2, 2\)",
        ),
        ({**good, "p1:v": np.zeros(5, np.float32)}, "p1:v is float64 .* states float32"),
        ({key: value for key, value in good.items() if key != "p1:v"}, r"parameter p1 are \['m'\]"),
    ]:
        with pytest.raises(StateError, match=message):
            optimizer.set_states(states)
    for key, array in optimizer.get_states().items():
        np.testing.assert_array_equal(array, good[key])
    fresh = optim.Adam(lr=0.1)
    fresh.set_states(good)
    with pytest.raises(StateError, match="p0:m is"):
        fresh.attach([Tensor((2, 2), name="p0")])


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

    for array, expected in zip(trained(steps), trained(None), strict=True):
        np.testing.assert_array_equal(array, expected)
    adam = optim.Adam()
    adam.update(Tensor((3,), name="w"), Tensor((3,)))
    with pytest.raises(StateError, match=r"\['m', 'v'\], where SGD"):
        optim.SGD(lr=0.1).set_states(adam.get_states())


def test_names_tell_parameters_apart():
    twins = [Tensor((2,), name="w"), Tensor((2,), name="w")]
    optimizer = optim.RMSProp()
    with pytest.raises(UsageError, match="two parameters are named w"):
        optimizer.attach(twins)
    for param in twins:
        optimizer.update(param, Tensor((2,)))
    with pytest.raises(UsageError, match="parameter w cannot be told apart"):
        optimizer.get_states()


@pytest.mark.parametrize("way", ["__call__", "backward_and_update"])
def test_a_call_is_a_step(training, way):
    w = Tensor(data=np.array([4.0]), stores_grad=True, name="w", dtype=np.float64)
    optimizer = optim.SGD(lr=ExponentialDecay(0.25, 1, 0.5))
    for expected in (3.0, 2.625):  # w -= lr * w
        getattr(optimizer, way)(w * w * 0.5)
        assert w.item() == expected
    assert (optimizer.step_counter.item(), optimizer.values["lr"]) == (2, 0.0625)
    optimizer.call(w * w * 0.5)  # a step that `step` has not counted yet
    assert (w.item(), optimizer.step_counter.item(), optimizer.values["lr"]) == (2.625 - 2.625 / 16, 2, 0.0625)


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (Tensor((3,)), r"gradient of float32 and shape \(3,\) is none of w of float32 and shape \(2,\)"),
        (Tensor((2,), dtype=np.float64), r"gradient of float64 and shape \(2,\) is none of w of float32"),
    ],
)
def test_a_gradient_of_another_shape_or_type_is_refused(grad, message):
    for call in (optim.SGD().update, lambda w, g: optim.Adam().apply("w", w, g)):
        with pytest.raises(UsageError, match=message):
            call(Tensor((2,), name="w"), grad)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (optim.SGD, {"lr": -0.1}),
        (optim.SGD, {"lr": float("nan")}),
        (optim.SGD, {"momentum": -1}),
        (optim.SGD, {"dampening": -1}),
        (optim.SGD, {"weight_decay": float("inf")}),
        (optim.SGD, {"nesterov": True}),
        (optim.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        (optim.Adam, {"beta_1": 1}),
        (optim.Adam, {"beta_2": -0.1}),
        (optim.Adam, {"epsilon": -1}),
        (optim.RMSProp, {"rho": 1.0}),
        (optim.AdaGrad, {"weight_decay": -1}),
        (optim.SGD, {"lr": "0.1"}),
        (optim.SGD, {"lr": None}),
        (optim.SGD, {"momentum": FALLING, "dampening": FALLING, "nesterov": True}),
        (ExponentialDecay, {"init_value": 0.1, "decay_steps": 0, "decay_rate": 0.5}),
        (ExponentialDecay, {"init_value": 0.1, "decay_steps": 1, "decay_rate": -0.5}),
        (optim.StepDecay, {"init_value": 0.1, "milestones": [3, 0]}),
        (optim.StepDecay, {"init_value": 0.1, "milestones": ["3"]}),
        (optim.StepDecay, {"init_value": 0.1, "milestones": [3], "decay_rate": float("nan")}),
        (optim.CosineDecay, {"init_value": 0.1, "decay_steps": 0}),
        (optim.CosineDecay, {"init_value": 0.1, "decay_steps": 5, "end_value": -0.1}),
        (optim.LinearWarmUp, {"schedule": 0.1, "warm_up_steps": 0}),
        (optim.LinearWarmUp, {"schedule": -0.1, "warm_up_steps": 3}),
        (optim.LinearWarmUp, {"schedule": 0.1, "warm_up_steps": 3, "start_factor": -1}),
        (optim.Constant, {"init_value": -0.1}),
    ],
)
def test_values_that_make_no_sense_are_refused(make, options):
    with pytest.raises(UsageError):
        make(**options)


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
        with pytest.raises(UsageError, match=message):
            setattr(sgd, name, value)
    assert sgd.values == kept
    assert sgd.momentum.init_value == 0.9
