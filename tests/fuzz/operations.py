"""Programs of tensors: operations, changes in place, and a backward pass, against complex steps in float64.

The oracle repeats the program with plain NumPy arrays of complex numbers: of a parameter whose imaginary part is tiny,
the loss has the derivative as its imaginary part (Squire and Trapp, SIAM Review 40, 1998). Changes in place concern
real parts only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from distopt import autograd
from distopt.errors import UsageError
from distopt.nn.tensor import Tensor

__all__ = ["Change", "Program", "Take", "run"]

SHAPE = (2, 3)
STEP = 1e-30


class Take(NamedTuple):
    """A new tensor: an operation of `OPERATIONS` on tensors, modulo their number."""

    name: str
    of: tuple[int, int]


class Change(NamedTuple):
    """A change in place of a tensor, modulo their number."""

    name: str
    of: int


@dataclass(frozen=True)
class Program:
    """The first two tensors are parameters, the next two are not. The loss is the mean of the last four, after all."""

    seed: int
    steps: tuple[Take | Change, ...]
    late: tuple[Change, ...]  # between forward and backward


def _larger(a: Any, b: Any) -> Any:
    return np.where(a.real >= b.real, a, b)


OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "div": (lambda a, b: a / (b * b + 1.0), lambda a, b: a / (b * b + 1)),
    "max": (lambda a, b: autograd.max(a, b), _larger),
    "sum of one": (lambda a, b: autograd.sum(a), lambda a, b: +a),
    "max of one": (lambda a, b: autograd.max(a), lambda a, b: +a),
    "relu": (lambda a, b: autograd.relu(a), lambda a, b: np.where(a.real > 0, a, 0)),
    "sigmoid": (lambda a, b: autograd.sigmoid(a), lambda a, b: 1 / (1 + np.exp(-a))),
    "tanh": (lambda a, b: autograd.tanh(a), lambda a, b: np.tanh(a)),
    "softmax": (lambda a, b: autograd.softmax(a), lambda a, b: (e := np.exp(a)) / e.sum(-1, keepdims=True)),
    "matmul": (lambda a, b: a @ autograd.transpose(b) @ b, lambda a, b: a @ b.T @ b),
    "flatten": (lambda a, b: (a.reshape((6,)) * b.reshape((6,))).reshape(SHAPE), lambda a, b: a * b),
    "cat": (
        lambda a, b: autograd.slice(autograd.cat([a, b], 0), [1], [3], [0]),
        lambda a, b: np.concatenate([a, b])[1:3],
    ),
    "row": (lambda a, b: a + autograd.reduce_sum(b, [0]), lambda a, b: a + b.sum(0, keepdims=True)),
    "prelu": (lambda a, b: autograd.prelu(a, b), lambda a, b: np.where(a.real >= 0, a, a * b)),
}


def _multiply(x: Tensor) -> None:
    x *= 0.5


def _add(x: Tensor) -> None:
    x += 1.5


CHANGES: dict[str, tuple[Callable[[Tensor], None], Callable[[np.ndarray], np.ndarray]]] = {
    "add": (_add, lambda a: a + 1.5),
    "multiply": (_multiply, lambda a: a * 0.5),
    "set": (lambda x: x.set_value(0.25), lambda a: np.full_like(a, 0.25)),
    "copy": (lambda x: x.copy_from_numpy(np.full(SHAPE, -0.5, np.float32)), lambda a: np.full_like(a, -0.5)),
}

_takes = st.builds(Take, st.sampled_from(list(OPERATIONS)), st.tuples(*[st.integers(0, 15)] * 2))
_changes = st.builds(Change, st.sampled_from(list(CHANGES)), st.integers(0, 15))
_steps = st.lists(_takes | _takes | _changes, min_size=1, max_size=10).map(tuple)
PROGRAMS = st.builds(Program, st.integers(0, 99), _steps, st.lists(_changes, max_size=2).map(tuple))


def _values(program: Program) -> list[np.ndarray]:
    rng = np.random.default_rng(program.seed)
    return [rng.uniform(-1.5, 1.5, SHAPE).astype(np.float32) for _ in range(4)]


def run(program: Program) -> None:
    """Check loss and gradients; a clear refusal is right where anything was changed in place."""
    tensors = [Tensor(data=value, stores_grad=i < 2) for i, value in enumerate(_values(program))]
    autograd.training = True
    try:
        for step in program.steps:
            if isinstance(step, Take):
                a, b = (tensors[i % len(tensors)] for i in step.of)
                tensors.append(OPERATIONS[step.name][0](a, b))
            elif _may_change(tensors, step):
                CHANGES[step.name][0](tensors[step.of % len(tensors)])
        loss = autograd.reduce_mean(autograd.sum(*tensors[-4:]), [0, 1], keepdims=False).reshape((1,))
        for change in program.late:
            if _may_change(tensors, change):
                CHANGES[change.name][0](tensors[change.of % len(tensors)])
        gradients = {id(p): g.to_numpy() for p, g in autograd.backward(loss)} if loss.in_graph else {}
    except UsageError as error:
        changes = any(isinstance(step, Change) for step in (*program.steps, *program.late))
        if not changes or "changed in place" not in str(error):
            raise
        return
    finally:
        autograd.training = False
    for which in range(2):
        for place in range(6):
            value, reached = _oracle(program, which, place)
            got, want = loss.to_numpy().item(), value.real
            assert abs(got - want) <= 1e-4 * max(1.0, abs(want)), f"the loss is {got}, not {want}"
            gradient = gradients.get(id(tensors[which]))
            assert (gradient is None) == (not reached), f"parameter {which} {'has no' if reached else 'has a'} gradient"
            if gradient is not None:
                got, want = gradient.reshape(-1)[place], value.imag / STEP
                what = f"gradient {place} of parameter {which} is {got}, not {want}"
                assert abs(got - want) <= 1e-3 * max(1.0, abs(want)), what


def _may_change(tensors: list[Tensor], step: Change) -> bool:
    """Of results that depend on a parameter, arithmetic makes new tensors, and other changes have no meaning."""
    return not tensors[step.of % len(tensors)].in_graph


def _oracle(program: Program, which: int, place: int) -> tuple[Any, bool]:
    """The loss, of which the imaginary part is `STEP` times its derivative, and whether the parameter is below it."""
    arrays = [value.astype(complex) for value in _values(program)]
    arrays[which].reshape(-1)[place] += STEP * 1j
    below = [{0}, {1}, set(), set()]  # the parameters below each tensor

    for step in program.steps:
        if isinstance(step, Take):
            a, b = (i % len(arrays) for i in step.of)
            arrays.append(OPERATIONS[step.name][1](arrays[a], arrays[b]))
            unary = step.name in _UNARY
            below.append(below[a] if unary else below[a] | below[b])
        elif (i := step.of % len(arrays)) < 2 or not below[i]:
            arrays[i].real = CHANGES[step.name][1](arrays[i]).real
    return sum(arrays[-4:]).mean(), which in set().union(*below[-4:])


_UNARY = {"sum of one", "max of one", "relu", "sigmoid", "tanh", "softmax"}
