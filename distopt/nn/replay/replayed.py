"""Replay of training steps on the CPU: only the calls of kernels, without the Python code around them.

A step is recorded while it runs: which kernels its forward and backward passes call, and on which arrays. The arrays
are kept. A replay copies new arguments into the recorded ones and repeats the calls. It computes the same bits, without
the cost of layers, checks, graph traversal and allocation, which in a small network equals that of a layer.

A replay cannot observe Python code that does not run. Therefore only operations that compute solely through kernels
(`Operation.native`) are recorded, on arguments, model states and results of each other, and two steps must have done
the same before one is replayed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from ..core import autograd
from ..core.mode import Ran, mode
from ..core.operation import Operation
from ..core.tensor import Tensor
from ..devices.device import Device
from ..kernels.recorder import recorder
from .step import CaptureError, Piece, RecordedStep

_OF_A_CALL = {"inputs", "needs", "order", "saved"}  # attributes of an operation that differ from call to call


class ReplayedStep(RecordedStep):
    """A step that was recorded, or is about to be. Its work is a list of calls."""

    begun = True  # kernels run as they are recorded

    def __init__(
        self, device: Device, inputs: Sequence[Any], options: dict[str, Any], states: Iterable[Tensor]
    ) -> None:
        super().__init__(device, inputs, options, states)
        self._ran: list[Ran] = []

    def __str__(self) -> str:
        return f"recorded as {len(self.forward) + sum(len(piece.work) for piece in self.pieces)} calls of kernels"

    def begin(self) -> None:
        mode.ran, recorder.calls = [], []

    def abort(self) -> None:
        mode.ran = recorder.calls = None

    def end_forward(self, loss: Tensor) -> None:
        ran, self.forward = mode.ran or [], recorder.calls
        self.abort()
        self._ran = [entry for entry in ran if isinstance(entry, Ran)]
        hindrance = next((entry for entry in ran if isinstance(entry, str)), None) or self._foreign()
        if hindrance or not self.computed(loss):
            self.failure = CaptureError(hindrance or "the loss was not computed in this step")

    def _foreign(self) -> str:
        """Why a replay would not recompute everything; empty if it would."""
        known = {*self._arguments(), *(tensor for tensor, _ in self._states)}
        for op, inputs, out in self._ran:
            if op.half or not _is_native(op):
                return f"{type(op).__name__} does not compute by kernels alone"
            if not known.issuperset(inputs):
                return f"{type(op).__name__} has an input that is not an argument, state or result of an operation"
            known.add(out)
        return ""

    def record_backward(self, loss: Tensor, pauses: Container[object]) -> Iterator[tuple[Tensor, Tensor]]:
        visits = autograd.plan(loss)
        pending = autograd.first_gradient(loss, visits)
        self.failure = CaptureError("the optimizer does not take all gradients")
        piece = Piece([], [])
        for visit in visits:
            recorder.calls = piece.work
            try:
                final = autograd.visit_one(visit, pending)
            finally:
                recorder.calls = None
            piece.pairs.extend((param, grad.array) for param, grad in final)
            if not self.pieces or self.pieces[-1] is not piece:
                self.pieces.append(piece)
            if any(param in pauses for param in visit.final):
                piece = Piece([], [])
            yield from final
        self.failure = None

    def computed(self, tensor: Tensor) -> bool:
        return any(tensor is ran.out for ran in self._ran)

    def launch(self, work: Any) -> None:
        for function, args in work:
            function(*args)

    def difference(self, other: ReplayedStep) -> str:
        """The difference between this step and another one with the same kind of arguments; empty if there is none."""
        if len(self._ran) != len(other._ran):
            return "another number of operations runs"
        for mine, its in zip(self._ran, other._ran, strict=True):
            name = type(mine.op).__name__
            if not _alike(_settings(mine.op), _settings(its.op)):
                return f"{name} takes the place of {type(its.op).__name__}, or has other settings"
            if self._origins(mine) != other._origins(its):
                return f"{name} has other inputs"
        calls, others = ([step.call, *step.later] for step in (self, other))
        if not _alike([call and call.others for call in calls], [call and call.others for call in others]):
            return "the optimizer is called with other arguments"
        return ""

    def _origins(self, ran: Ran) -> list[Any]:
        """For each input, its number among arguments and results or, for a state, its id."""
        numbers = {out: i for i, (_, _, out) in enumerate(self._ran)}
        numbers.update({tensor: ~i for i, tensor in enumerate(self._arguments())})
        return [numbers.get(tensor, id(tensor)) for tensor in ran.inputs]

    def _arguments(self) -> list[Tensor]:
        return [value for value in (*self.inputs, *self.options.values()) if isinstance(value, Tensor)]


def _is_native(op: Operation) -> bool:
    """Whether the classes that define its `forward` and `gradients` are native: a subclass may compute otherwise."""
    owners = (next(base for base in type(op).__mro__ if name in vars(base)) for name in ("forward", "gradients"))
    return all(vars(owner).get("native") for owner in owners)


def _settings(op: Operation) -> list[Any]:
    return [type(op), *(item for item in vars(op).items() if item[0] not in _OF_A_CALL)]


def _alike(a: Any, b: Any) -> bool:
    """Whether both are the same object, equal numbers or strings, or collections of such."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(value, b[key]) for key, value in a.items())
    return isinstance(a, (bool, int, float, str)) and a == b
