"""Optimizer updates: the same bits on every instruction set; test_optim.py compares them with the formulas."""

import numpy as np
import pytest

from distopt import _core
from distopt.nn.numerics import cpu

SETTINGS = {
    "sgd": [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-5},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
        {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ],
    "adam": [{"lr": 0.01}, {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.1}],
    "rmsprop": [{"lr": 0.01, "rho": 0.9}, {"lr": 0.01, "rho": 0.7, "eps": 1e-4, "weight_decay": 0.1}],
    "adagrad": [{"lr": 0.1}, {"lr": 0.1, "eps": 1e-4, "weight_decay": 0.1}],
}
# Each rule's arguments, in order, with their default values.
VALUES = {
    "sgd": {"lr": 0.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "adam": {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "rmsprop": {"lr": 0.0, "rho": 0.9, "eps": 1e-8, "weight_decay": 0.0},
    "adagrad": {"lr": 0.0, "eps": 1e-8, "weight_decay": 0.0},
}
CASES = [(name, settings) for name, several in SETTINGS.items() for settings in several]
SHAPES = [1, 7, 1003, (3, 5, 7), 0]
GATES = (np.array(True), np.array(False), np.array(True))


def array(shape, dtype, seed):
    return np.random.default_rng([seed, np.prod(shape, dtype=int)]).standard_normal(shape).astype(dtype)


def run(kernels, name, settings, shape, dtype, steps=3, smallest=1e-9, gates=(None,)):
    """Parameter and state after some steps; the gradients reach down to `smallest`, and must not change.

    Each step is done once for every gate; one of them lets it through.
    """
    param = array(shape, dtype, 0)
    n_states = {"sgd": int("momentum" in settings), "adam": 2}.get(name, 1)
    states = [np.zeros_like(param) for _ in range(n_states)]
    scale = np.resize(np.geomspace(1, smallest, 7), param.shape).astype(dtype)
    for step in range(steps):
        grad = array(shape, dtype, 1 + step) * scale
        kept = grad.copy()
        slots, counted = states or [None], [step + 1] * (name == "adam")
        for gate in gates:
            gated = {} if gate is None else {"gate": gate}
            rule = *counted, *(VALUES[name] | settings).values()
            kernels.update(name, [(param, grad * np.nan if gate else grad, slots)], *rule, **gated)
        np.testing.assert_array_equal(grad, kept)
    return [param, *states]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_updates(name, settings, dtype, shape):
    before = _core.isa()
    results = []
    try:
        for isa in _core.supported_isas() * 2:
            _core.set_isa(isa)
            results.append(run(cpu, name, settings, shape, dtype))
    finally:
        _core.set_isa(before)
    results.append(run(cpu, name, settings, shape, dtype, gates=GATES))  # which leave some updates out
    assert len({tuple(a.tobytes() for a in arrays) for arrays in results}) == 1
