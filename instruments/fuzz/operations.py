"""Programs of tensors, against complex steps in float64: training steps, changes in place and hand edits.

The oracle repeats a step with plain NumPy arrays of complex numbers: of a parameter whose imaginary part is tiny, the
loss has the derivative as its imaginary part (Squire and Trapp, SIAM Review 40, 1998). Changes in place concern real
parts only.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from hypothesis import strategies as st

from distopt import autograd, opt
from distopt.comm.single import SingleCommunicator
from distopt.errors import UsageError
from distopt.launch.job.topology import Topology
from distopt.model import Model
from distopt.nn.core.tensor import Tensor
from distopt.nn.ops import matrix

SHAPE = (2, 3)
PARAMS = {"p0": SHAPE, "p1": SHAPE, "w0": (3, 3), "v0": (3,), "w1": (3, 3), "v1": (3,)}
STEP = 1e-30
RATE = 0.25
SIZES = [math.prod(shape) for shape in PARAMS.values()]
LARGEST = 100.0  # values beyond it leave float32 too few digits
Function: TypeAlias = Callable[..., Any]


class Take(NamedTuple):
    """A new tensor, by an operation of `OPERATIONS` on two tensors and a pair of weights, modulo their numbers."""

    name: str
    of: tuple[int, int]  # the second number is that of the pair, too


class Change(NamedTuple):
    """A change of a tensor by `CHANGES`, in place, or of a parameter by `EDITS`; modulo their number."""

    name: str
    of: int


@dataclass(frozen=True)
class Program:
    """Calls of one training step.

    The first two tensors are the parameters p0 and p1, the third is the input. The last, or their sum, goes through a
    linear layer to the loss.
    """

    seed: int
    averaged: bool  # by a DistOpt, whose gradients lie in buckets
    last: int
    steps: tuple[Take | Change, ...]
    late: tuple[Change, ...]  # between forward and backward
    edits: tuple[tuple[Change, ...], ...]  # for each call, what a script does before it


# -- what is done to tensors, and to arrays; a and b are of `SHAPE`, the weights w [3, 3] and v [3] --------------------
def _both(function):
    return function, function


def _positive(a):
    return np.where(a.real > 0, a, 0)


OPERATIONS = {
    "sum of one": (lambda a, *_: autograd.sum(a), lambda a, *_: +a),
    "max of one": (lambda a, *_: autograd.max(a), lambda a, *_: +a),
    "relu": (lambda a, *_: autograd.relu(a), lambda a, *_: _positive(a)),
    "sigmoid": (lambda a, *_: autograd.sigmoid(a), lambda a, *_: 1 / (1 + np.exp(-a))),
    "tanh": (lambda a, *_: autograd.tanh(a), lambda a, *_: np.tanh(a)),
    "softmax": (lambda a, *_: autograd.softmax(a), lambda a, *_: (e := np.exp(a)) / e.sum(-1, keepdims=True)),
    "reshape": (lambda a, *_: a.reshape((6,)).reshape(SHAPE), lambda a, *_: a),
    "linear": (lambda a, _, w, v: matrix.Linear()(a, w, v), lambda a, _, w, v: a @ w + v[:, None]),
    "linear relu": (
        lambda a, _, w, v: matrix.Linear(relu=True)(a, w, v),
        lambda a, _, w, v: _positive(a @ w + v[:, None]),
    ),
    "add": _both(lambda a, b, *_: a + b),
    "sub": _both(lambda a, b, *_: a - b),
    "mul": _both(lambda a, b, *_: a * b),
    "div": _both(lambda a, b, *_: a / (b * b + 1.0)),
    "max": (lambda a, b, *_: autograd.max(a, b), lambda a, b, *_: np.where(a.real >= b.real, a, b)),
    "matmul": (lambda a, b, *_: a @ autograd.transpose(b) @ b, lambda a, b, *_: a @ b.swapaxes(1, 2) @ b),
    "flatten": (lambda a, b, *_: (a.reshape((6,)) * b.reshape((6,))).reshape(SHAPE), lambda a, b, *_: a * b),
    "cat": (
        lambda a, b, *_: autograd.slice(autograd.cat([a, b], 0), [1], [3], [0]),
        lambda a, b, *_: np.concatenate([a, b], 1)[:, 1:3],
    ),
    "row": (lambda a, b, *_: a + autograd.reduce_sum(b, [0]), lambda a, b, *_: a + b.sum(1, keepdims=True)),
    "prelu": (lambda a, b, *_: autograd.prelu(a, b), lambda a, b, *_: np.where(a.real >= 0, a, a * b)),
}
SHARING = ["sum of one", "max of one", "reshape"] * 3  # results that may share memory are drawn more often


CHANGES = {
    "add": (lambda x: operator.iadd(x, 1.5), lambda a: a + 1.5),
    "multiply": (lambda x: operator.imul(x, 0.5), lambda a: a * 0.5),
    "set": (lambda x: x.set_value(0.25), lambda a: np.full_like(a, 0.25)),
    "copy": (lambda x: x.copy_from_numpy(np.full(SHAPE, -0.5, np.float32)), lambda a: np.full_like(a, -0.5)),
}


def _other_buckets(net, param):
    if isinstance(net.optimizer, opt.DistOpt):
        net.optimizer.bucket_elements = 5 if net.optimizer.bucket_elements > 5 else 1000


# A script's edits of a network, or of a parameter.
EDITS = {
    "gradient times 3": lambda net, param: param.grad is None or operator.imul(param.grad, 3.0),
    "gradient to NaN": lambda net, param: param.grad is None or param.grad.set_value(np.nan),
    "half the values": lambda net, param: operator.imul(param, 0.5),
    "evaluation": lambda net, param: (net.eval(), net(Tensor(SHAPE)), net.train()),
    "a gradient by hand": lambda net, param: param.requires_grad and list(autograd.backward(param * param, 1.0)),
    "a gradient of the script's": lambda net, param: setattr(param, "grad", Tensor(data=np.full_like(param.array, 7))),
    "no gradient": lambda net, param: setattr(param, "grad", None),
    "other memory": lambda net, param: setattr(param, "data", param.array.copy()),
    "other buckets": _other_buckets,
    "freeze": lambda net, param: setattr(net.w1, "requires_grad", not net.w1.requires_grad),
}

# -- programs ----------------------------------------------------------------------------------------------------------
_numbers = st.integers(0, 15)
_takes = st.builds(Take, st.sampled_from([*OPERATIONS, *SHARING]), st.tuples(_numbers, _numbers))
_changes, _edits = (st.builds(Change, st.sampled_from(list(names)), _numbers) for names in (CHANGES, EDITS))
PROGRAMS = st.builds(
    Program,
    st.integers(0, 99),
    st.booleans(),
    st.integers(1, 4),
    st.lists(_takes | _changes, max_size=10).map(tuple),
    st.lists(_changes, max_size=2).map(tuple),
    st.lists(st.lists(_edits, max_size=2).map(tuple), min_size=1, max_size=8).map(tuple),
)
LAST = Take("linear", (0, 0))


# -- a step ------------------------------------------------------------------------------------------------------------
def _take(step, side, tensors, weights):
    """The new tensor (side 0) or array (side 1)."""
    pair = weights[2:] if step.of[1] % 2 else weights[:2]
    return OPERATIONS[step.name][side](*(tensors[i % len(tensors)] for i in step.of), *pair)


class _Net(Model):
    def __init__(self, program):
        super().__init__()
        self.program, rng = program, np.random.default_rng(program.seed)
        for name, shape in PARAMS.items():
            values = rng.uniform(-0.7, 0.7, shape).astype(np.float32)
            setattr(self, name, Tensor(data=values, stores_grad=True))
        self.params = [getattr(self, name) for name in PARAMS]
        rule = opt.SGD(lr=RATE)
        if program.averaged:
            rule = opt.DistOpt(rule, communicator=SingleCommunicator(Topology.of_one_host(0, 1, "here")))
        self.set_optimizer(rule)
        self.compile([Tensor(SHAPE)], is_train=True)

    def forward(self, x):
        self.tensors, self.changes = [*self.params[:2], x], []
        for step in self.program.steps:
            if isinstance(step, Take):
                self.tensors.append(_take(step, 0, self.tensors, self.params[2:]))
            else:
                self.change(step)
        last = self.tensors[-self.program.last :]
        return _take(LAST, 0, [autograd.sum(*last) if len(last) > 1 else last[0]], self.params[2:])

    def change(self, change):
        """In place; of results that depend on a parameter, arithmetic makes new tensors: these are left alone."""
        tensor = self.tensors[change.of % len(self.tensors)]
        self.changes.append(not tensor.in_graph)
        if self.changes[-1]:
            CHANGES[change.name][0](tensor)

    def train_one_batch(self, x, labels):
        loss = autograd.softmax_cross_entropy(self.forward(x), labels)
        for change in self.program.late:
            self.change(change)
        self.optimizer(loss)
        return loss


def _repeat(net, arrays, x, labels):
    """The losses of complex values of the parameters, which change as in the net; None where values get too large."""
    arrays, weights, changes = [*arrays[:2], np.repeat(x[None], len(arrays[0]), 0)], arrays[2:], iter(net.changes)
    for step in (*net.program.steps, None, *net.program.late):
        if step is None:
            scores = _take(LAST, 1, [sum(arrays[-net.program.last :])], weights)
        elif isinstance(step, Take):
            arrays.append(_take(step, 1, arrays, weights))
        elif next(changes):
            array = arrays[step.of % len(arrays)]
            array.real = CHANGES[step.name][1](array.real)
    if max(np.abs(array).max() for array in [*arrays, scores]) > LARGEST:
        return None
    scores -= scores.real.max(-1, keepdims=True)
    return (np.log(np.exp(scores).sum(-1)) - scores[:, range(SHAPE[0]), labels]).mean(1)


# -- a run -------------------------------------------------------------------------------------------------------------
def run(program):
    """Check losses and parameters; a clear refusal is right where anything was changed in place."""
    changes = any(isinstance(step, Change) for step in (*program.steps, *program.late))
    autograd.training = True
    try:
        _run(_Net(program), program)
    except UsageError as error:
        if not changes or "changed in place" not in str(error):
            raise
    finally:
        autograd.training = False


def _run(net, program):
    for number, edits in enumerate(program.edits):
        for edit in edits:
            EDITS[edit.name](net, net.params[edit.of % len(PARAMS)])
        rng = np.random.default_rng([program.seed, number])
        x, labels = rng.uniform(-1.5, 1.5, SHAPE).astype(np.float32), rng.integers(0, 3, SHAPE[0])
        # For every element of all parameters, values in which that one is complex.
        steps = np.split(STEP * 1j * np.eye(sum(SIZES)), np.cumsum(SIZES)[:-1], 1)
        values = [
            param.to_numpy() + step.reshape(-1, *param.shape) for param, step in zip(net.params, steps, strict=True)
        ]
        loss = net(Tensor(data=x.copy()), Tensor(data=labels)).to_numpy().item()
        wanted = _repeat(net, values, x.astype(complex), labels)
        if wanted is None:
            return
        _check(loss, wanted[0].real, f"the loss of call {number}")
        slopes = np.split(wanted.imag / STEP, np.cumsum(SIZES)[:-1])
        for name, param, value, slope in zip(PARAMS, net.params, values, slopes, strict=True):
            moved = value[0].real - RATE * param.requires_grad * slope.reshape(param.shape)
            _check(param.to_numpy(), moved, f"{name} after call {number}")


def _check(got, want, what):
    np.testing.assert_allclose(got, want, 1e-4, 1e-4, err_msg=what)
