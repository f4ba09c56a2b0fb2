"""Programs of tensors, against complex steps in float64: operations with changes in place, and recorded steps.

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

from distopt import autograd, opt
from distopt.comm.single import SingleCommunicator
from distopt.errors import UsageError
from distopt.launch.topology import Topology
from distopt.model import Model
from distopt.nn import operations
from distopt.nn.tensor import Tensor

__all__ = ["Change", "Program", "Recorded", "Take", "run"]

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
_programs = st.builds(Program, st.integers(0, 99), _steps, st.lists(_changes, max_size=2).map(tuple))


def run(program: Program | Recorded) -> None:
    """Check losses and gradients; a clear refusal is right where anything was changed in place."""
    autograd.training = True
    try:
        _run_recorded(program) if isinstance(program, Recorded) else _run(program)
    except UsageError as error:
        changes = isinstance(program, Program) and any(isinstance(s, Change) for s in (*program.steps, *program.late))
        if not changes or "changed in place" not in str(error):
            raise
    finally:
        autograd.training = False


def _check(got: Any, want: float, bound: float, what: str) -> None:
    assert abs(got - want) <= bound * max(1.0, abs(want)), f"{what} is {got}, not {want}"


# -- operations and changes in place -----------------------------------------------------------------------------------
def _values(program: Program) -> list[np.ndarray]:
    rng = np.random.default_rng(program.seed)
    return [rng.uniform(-1.5, 1.5, SHAPE).astype(np.float32) for _ in range(4)]


def _run(program: Program) -> None:
    tensors = [Tensor(data=value, stores_grad=i < 2) for i, value in enumerate(_values(program))]
    for step in program.steps:
        if isinstance(step, Take):
            a, b = (tensors[i % len(tensors)] for i in step.of)
            tensors.append(OPERATIONS[step.name][0](a, b))
        else:
            _change(tensors, step)
    loss = autograd.reduce_mean(autograd.sum(*tensors[-4:]), [0, 1], keepdims=False).reshape((1,))
    for change in program.late:
        _change(tensors, change)
    gradients = {id(p): g.to_numpy() for p, g in autograd.backward(loss)} if loss.in_graph else {}
    for which in range(2):
        for place in range(6):
            value, reached = _oracle(program, which, place)
            _check(loss.to_numpy().item(), value.real, 1e-4, "the loss")
            gradient = gradients.get(id(tensors[which]))
            assert (gradient is None) == (not reached), f"parameter {which} {'has no' if reached else 'has a'} gradient"
            if gradient is not None:
                what = f"gradient {place} of parameter {which}"
                _check(gradient.reshape(-1)[place], value.imag / STEP, 1e-3, what)


def _change(tensors: list[Tensor], change: Change) -> None:
    """Of results that depend on a parameter, arithmetic makes new tensors, and other changes have no meaning."""
    tensor = tensors[change.of % len(tensors)]
    if not tensor.in_graph:
        CHANGES[change.name][0](tensor)


def _oracle(program: Program, which: int, place: int) -> tuple[Any, bool]:
    """The loss, of which the imaginary part is `STEP` times its derivative, and whether the parameter is below it."""
    arrays = [value.astype(complex) for value in _values(program)]
    arrays[which].reshape(-1)[place] += STEP * 1j
    below = [{0}, {1}, set(), set()]  # the parameters below each tensor

    for step in program.steps:
        if isinstance(step, Take):
            a, b = (i % len(arrays) for i in step.of)
            arrays.append(OPERATIONS[step.name][1](arrays[a], arrays[b]))
            below.append(below[a] if step.name in _UNARY else below[a] | below[b])
        elif (i := step.of % len(arrays)) < 2 or not below[i]:
            arrays[i].real = CHANGES[step.name][1](arrays[i]).real
    return sum(arrays[-4:]).mean(), which in set().union(*below[-4:])


_UNARY = {"sum of one", "max of one", "relu", "sigmoid", "tanh", "softmax"}


# -- recorded steps, and edits between them ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Recorded:
    """Calls of one training step, which is repeated without its Python code once it was recorded.

    The step takes operations of `LAYERS`, whose second number is that of weight and bias, and a linear layer in the
    end. `edits` has for each call which keys of `EDITS` a script does to which parameters before it.
    """

    seed: int
    averaged: bool  # by a DistOpt, whose gradients lie in buckets
    steps: tuple[Take, ...]
    edits: tuple[tuple[Change, ...], ...]


LAYERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (lambda x, w, b: operations.Linear()(x, w, b), lambda x, w, b: x @ w + b),
    "linear relu": (lambda x, w, b: operations.Linear(relu=True)(x, w, b), lambda x, w, b: _positive(x @ w + b)),
    "relu": (lambda x, w, b: autograd.relu(x), lambda x, w, b: _positive(x)),
    "sigmoid": (lambda x, w, b: autograd.sigmoid(x), lambda x, w, b: 1 / (1 + np.exp(-x))),
    "reshape": (lambda x, w, b: x.reshape((6,)).reshape(SHAPE), lambda x, w, b: x),
}


def _positive(x: Any) -> Any:
    return np.where(x.real > 0, x, 0)


class _Net(Model):
    def __init__(self, program: Recorded) -> None:
        super().__init__()
        self.steps, rng = program.steps, np.random.default_rng(program.seed)
        self.w0, self.b0, self.w1, self.b1 = (
            Tensor(data=rng.uniform(-0.7, 0.7, shape).astype(np.float32), stores_grad=True)
            for shape in ((3, 3), (3,), (3, 3), (3,))
        )

    def forward(self, x: Tensor) -> Tensor:
        return _taken(self.steps, 0, x, [self.w0, self.b0, self.w1, self.b1])

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), labels)
        self.optimizer(loss)
        return loss


def _taken(steps: tuple[Take, ...], side: int, x: Any, params: list[Any]) -> Any:
    """The result by operations of tensors (side 0) or of arrays (side 1)."""
    results = [x]
    for step in steps:
        which = 2 * (step.of[1] % 2)
        results.append(LAYERS[step.name][side](results[step.of[0] % len(results)], *params[which : which + 2]))
    return LAYERS["linear"][side](results[-1], *params[:2])


def _by_hand(net: _Net, param: Tensor) -> None:
    if param.requires_grad:
        list(autograd.backward(param * param, 1.0))


def _evaluate(net: _Net, param: Tensor) -> None:
    net.eval()
    net(Tensor(SHAPE))
    net.train()


def _times_3(net: _Net, param: Tensor) -> None:
    if param.grad is not None:
        param.grad *= 3.0


def _to_nan(net: _Net, param: Tensor) -> None:
    if param.grad is not None:
        param.grad.set_value(np.nan)


def _other_buckets(net: _Net, param: Tensor) -> None:
    if isinstance(net.optimizer, opt.DistOpt):
        net.optimizer.bucket_elements = 5 if net.optimizer.bucket_elements > 5 else 1000


# Of these the first, `HARMLESS` ones, leave all memory where it is.
EDITS: dict[str, Callable[[_Net, Tensor], object]] = {
    "gradient times 3": _times_3,
    "gradient to NaN": _to_nan,
    "half the values": lambda net, param: _multiply(param),
    "evaluation": _evaluate,
    "a gradient by hand": _by_hand,
    "a gradient of the script's": lambda net, param: setattr(param, "grad", Tensor(data=np.full_like(param.array, 7))),
    "no gradient": lambda net, param: setattr(param, "grad", None),
    "other memory": lambda net, param: setattr(param, "data", param.array.copy()),
    "other buckets": _other_buckets,
    "freeze": lambda net, param: setattr(net.w1, "requires_grad", not net.w1.requires_grad),
}
HARMLESS = list(EDITS)[:4]
BEFORE = 3  # calls until one is repeated

_layers = st.lists(st.builds(Take, st.sampled_from(list(LAYERS)), st.tuples(*[st.integers(0, 9)] * 2)), max_size=5)
_edits = st.lists(st.builds(Change, st.sampled_from(list(EDITS)), st.integers(0, 3)), max_size=2).map(tuple)
_recorded = st.builds(Recorded, st.integers(0, 99), st.booleans(), _layers.map(tuple),
                      st.lists(_edits, min_size=1, max_size=8).map(tuple))  # fmt: skip
PROGRAMS = _programs | _recorded


def _run_recorded(program: Recorded) -> None:
    net, rate = _Net(program), 0.25
    rule: Any = opt.SGD(lr=rate)
    if program.averaged:
        rule = opt.DistOpt(rule, communicator=SingleCommunicator(Topology.of_one_host(0, 1, "here")))
    net.set_optimizer(rule)
    net.compile([Tensor(SHAPE)], is_train=True, use_graph=True)
    for number, edits in enumerate(program.edits):
        params = [net.w0, net.b0, net.w1, net.b1]
        for edit in edits:
            EDITS[edit.name](net, params[edit.of])
        rng = np.random.default_rng([program.seed, number])
        x, labels = rng.uniform(-1.5, 1.5, SHAPE).astype(np.float32), rng.integers(0, 3, SHAPE[0])
        before = [param.to_numpy().astype(complex) for param in params]
        loss = net(Tensor(data=x), Tensor(data=labels)).to_numpy().item()
        for which, param in enumerate(params):
            for place in range(param.size()):
                values = [value.copy() for value in before]
                values[which].reshape(-1)[place] += STEP * 1j
                scores = _taken(program.steps, 1, x.astype(complex), values)
                scores -= scores.real.max(-1, keepdims=True)
                wanted = (np.log(np.exp(scores).sum(-1)) - scores[range(SHAPE[0]), labels]).mean()
                _check(loss, wanted.real, 1e-4, f"the loss of call {number}")
                moved = before[which].reshape(-1)[place].real - rate * param.requires_grad * wanted.imag / STEP
                what = f"element {place} of parameter {which} after call {number}"
                _check(param.to_numpy().reshape(-1)[place], moved, 1e-4, what)
    if all(edit.name in HARMLESS for edits in program.edits for edit in edits):
        replays = max(0, len(program.edits) - BEFORE)
        assert net.graph_replays == replays, f"{net.graph_replays} calls are repeated, not {replays}"
