"""Optimizers and schedules against PyTorch, and their states."""

import numpy as np
import pytest

from distopt import autograd
from distopt.errors import StateError, UsageError
from distopt.nn import optim
from distopt.nn.tensor import Tensor

CONFIGURATIONS = {
    "sgd": (optim.SGD, {"lr": 0.1}, "SGD", {"lr": 0.1}),
    "sgd decay": (optim.SGD, {"lr": 0.1, "weight_decay": 0.2}, "SGD", {"lr": 0.1, "weight_decay": 0.2}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}, "SGD", {"lr": 0.1, "momentum": 0.9}),
    "dampening": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    ),
    "nesterov": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.8, "nesterov": True},
        "SGD",
        {"lr": 0.1, "momentum": 0.8, "nesterov": True},
    ),
    "adam": (optim.Adam, {"lr": 0.02}, "Adam", {"lr": 0.02, "eps": 1e-8}),
    "adam all": (
        optim.Adam,
        {"lr": 0.02, "beta_1": 0.7, "beta_2": 0.95, "epsilon": 1e-3, "weight_decay": 0.1},
        "Adam",
        {"lr": 0.02, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "rmsprop": (optim.RMSProp, {"lr": 0.02, "rho": 0.8}, "RMSprop", {"lr": 0.02, "alpha": 0.8, "eps": 1e-8}),
    "rmsprop decay": (
        optim.RMSProp,
        {"lr": 0.02, "weight_decay": 0.1, "epsilon": 1e-4},
        "RMSprop",
        {"lr": 0.02, "alpha": 0.9, "eps": 1e-4, "weight_decay": 0.1},
    ),
    "adagrad": (optim.AdaGrad, {"lr": 0.1}, "Adagrad", {"lr": 0.1, "eps": 1e-8}),
    "adagrad decay": (
        optim.AdaGrad,
        {"lr": 0.1, "weight_decay": 0.1, "epsilon": 1e-3},
        "Adagrad",
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1},
    ),
}


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


def gradients(step, dtype=np.float64):
    rng = np.random.default_rng(100 + step)
    return [Tensor.of(rng.standard_normal(shape).astype(dtype)) for shape in [(7, 3), (5,)]]


def run(optimizer, targets, steps):
    for step in steps:
        for param, grad in zip(targets, gradients(step, targets[0].dtype), strict=True):
            optimizer.update(param, grad)
        optimizer.step()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_steps_equal_pytorch(name, dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle of this test; pip install torch==2.13.0")
    make, options, theirs, their_options = CONFIGURATIONS[name]
    ours = params(dtype)
    oracle = [torch.nn.Parameter(torch.from_numpy(p.to_numpy())) for p in ours]
    optimizer, their_optimizer = make(**options), getattr(torch.optim, theirs)(oracle, **their_options)
    for step in range(6):
        run(optimizer, ours, [step])
        for p, grad in zip(oracle, gradients(step, dtype), strict=True):
            p.grad = torch.from_numpy(grad.array)
        their_optimizer.step()
        for p, q in zip(ours, oracle, strict=True):
            np.testing.assert_allclose(p.array, q.detach().numpy(), rtol=1e-4 if dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_states_continue_a_run_to_the_bit(name):
    make, options, *_ = CONFIGURATIONS[name]
    options = {**options, "lr": optim.ExponentialDecay(options["lr"], 2, 0.5)}
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
        (foreign, r"parameter p0 are \['momentum'\], where Adam as it is set up has \['m', 'step', 'v'\]"),
        (
            {**good, "p0:m": np.zeros((2, 2))},
            r"state p0:m is float64 of shape \(2, 2\); expected float64 of shape \(7, 3\)",
        ),
        ({**good, "p1:v": np.zeros(5, np.float32)}, "state p1:v is float32"),
        ({key: value for key, value in good.items() if key != "p1:v"}, r"parameter p1 are \['m', 'step'\]"),
    ]:
        with pytest.raises(StateError, match=message):
            optimizer.set_states(states)
    for key, array in optimizer.get_states().items():
        np.testing.assert_array_equal(array, good[key])
    fresh = optim.Adam(lr=0.1)
    fresh.set_states(good)
    with pytest.raises(StateError, match="state p0:m"):
        fresh.attach([Tensor((2, 2), name="p0")])


def test_names_tell_parameters_apart():
    twins = [Tensor((2,), name="w"), Tensor((2,), name="w")]
    optimizer = optim.RMSProp()
    with pytest.raises(UsageError, match="two parameters are named w"):
        optimizer.attach(twins)
    for param in twins:
        optimizer.update(param, Tensor((2,)))
    with pytest.raises(UsageError, match="parameter w cannot be told apart"):
        optimizer.get_states()


def test_a_call_is_a_step(monkeypatch):
    monkeypatch.setattr(autograd, "training", True)
    w = Tensor(data=np.array([4.0]), stores_grad=True, name="w", dtype=np.float64)
    optimizer = optim.SGD(lr=optim.ExponentialDecay(0.25, 1, 0.5))
    for expected in (3.0, 2.625):  # w -= lr * w
        optimizer(w * w * 0.5)
        assert w.item() == expected
    assert optimizer.step_counter == 2
    assert optimizer.lr_value == 0.0625


def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(UsageError, match=r"gradient of shape \(3,\) is none of w of shape \(2,\)"):
        optim.SGD().update(Tensor((2,), name="w"), Tensor((3,)))


def test_schedules():
    assert [optim.Constant(0.3)(step) for step in (0, 100)] == [0.3, 0.3]
    smooth = optim.ExponentialDecay(0.8, 10, 0.25)
    np.testing.assert_allclose([smooth(s) for s in (0, 5, 10, 25)], [0.8, 0.4, 0.2, 0.8 * 0.25**2.5])
    stairs = optim.ExponentialDecay(0.8, 10, 0.25, staircase=True)
    np.testing.assert_allclose([stairs(s) for s in (0, 9, 10, 25)], [0.8, 0.8, 0.2, 0.05])


def test_schedule_equals_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle of this test; pip install torch==2.13.0")
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    schedule = torch.optim.lr_scheduler.StepLR(theirs, step_size=3, gamma=0.6)
    ours = optim.SGD(lr=optim.ExponentialDecay(0.7, 3, 0.6, staircase=True))
    for _ in range(8):
        assert ours.lr_value == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        ours.step()
        theirs.step()
        schedule.step()


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
        (optim.ExponentialDecay, {"init_value": 0.1, "decay_steps": 0, "decay_rate": 0.5}),
        (optim.ExponentialDecay, {"init_value": 0.1, "decay_steps": 1, "decay_rate": -0.5}),
        (optim.Constant, {"init_value": -0.1}),
    ],
)
def test_values_that_make_no_sense_are_refused(make, options):
    with pytest.raises(UsageError):
        make(**options)
