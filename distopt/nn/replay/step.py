"""A training step that is captured in CUDA graphs and then replayed; see `distopt.nn.replay.graphs`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...errors import DistoptError
from ..core import autograd
from ..core.array import Array
from ..core.tensor import Tensor
from ..devices.device import Device
from .capture import Capture


class CaptureError(DistoptError):
    """A step cannot be captured; the message says why."""


class OptimizerCall(NamedTuple):
    """A call of a method of the optimizer.

    Attributes:
        name: of the method.
        values: the arguments, by index or keyword.
        place: that of the loss among them, or None without one.
    """

    name: str
    values: dict[int | str, Any]
    place: int | str | None

    def on(self, optimizer: Any, loss: Tensor | None = None) -> Any:
        """Make the same call of `optimizer`, with `loss` in place of the captured loss if one is given."""
        values = [
            (key, loss if loss is not None and key == self.place else value) for key, value in self.values.items()
        ]
        args = [value for key, value in values if isinstance(key, int)]
        return getattr(optimizer, self.name)(*args, **{key: value for key, value in values if isinstance(key, str)})

    @property
    def loss(self) -> Tensor:
        """The loss of the call itself."""
        assert self.place is not None
        loss: Tensor = self.values[self.place]
        return loss


class Piece(NamedTuple):
    """A graph of the backward pass, and the parameters whose gradients are final after it, each with its gradient."""

    work: Any
    pairs: list[tuple[Tensor, Array]]


class CapturedStep:
    """A step that was captured, or is about to be.

    Attributes:
        device: where it runs.
        capture: captures its pieces, and owns their memory.
        inputs: arguments for the call of `train_one_batch` that is captured.
        options: likewise, by keyword.
        call: that of the optimizer with the loss.
        later: calls of the optimizer that follow, such as `step`.
        results: of `train_one_batch`.
        failure: why the step cannot be repeated.
        forward: graph of the forward pass; None until it is complete.
        pieces: the backward pass.
    """

    def __init__(
        self, device: Device, inputs: Sequence[Any], options: dict[str, Any], states: Iterable[Tensor]
    ) -> None:
        self.device = device
        self.capture = Capture(device)
        with self.capture.own_memory():
            self.inputs = [_copied(value) for value in inputs]
            self.options = {key: _copied(value) for key, value in options.items()}
        self.call: OptimizerCall | None = None
        self.later: list[OptimizerCall] = []
        self.results: Any = None
        self.failure: Exception | None = None
        self.forward: Any = None
        self.pieces: list[Piece] = []
        self._calls = 0
        self._states = [(tensor, tensor.array) for tensor in states]
        self._leaves: list[Array] = []
        self._moved = False  # whether a gradient must now be written elsewhere

    def __str__(self) -> str:
        nodes = self.forward.nodes + sum(piece.work.nodes for piece in self.pieces)
        return f"captured in {1 + len(self.pieces)} CUDA graphs of {nodes} nodes"

    # -- capture -----------------------------------------------------------------------------------------------------
    def seen(self, optimizer: Any, call: OptimizerCall) -> Any:
        """Handle a call of the optimizer. The first call with a loss completes the forward pass."""
        if call.place is None:
            if not self._calls:
                self.failure = CaptureError(early_text(call))
                raise self.failure
            self.later.append(call)
            return call.on(optimizer)
        self._calls += 1
        if self._calls > 1:
            return call.on(optimizer)
        self.call = call
        self.forward = self.capture.end()
        self.capture.launch(self.forward)
        gradients, order = partial(self._backward, call.loss), partial(autograd.gradient_order, call.loss)
        return call.on(optimizer, self._loss(autograd.CustomBackward(gradients, order)))

    def _loss(self, creator: autograd.CustomBackward) -> Tensor:
        assert self.call is not None
        loss = Tensor.of(self.call.loss.array, self.device)
        loss.creator = creator
        return loss

    def _backward(self, loss: Tensor, dy: Tensor | None, pauses: Container[object]) -> Iterator[tuple[Tensor, Tensor]]:
        """Capture the backward pass, in pieces that end at the parameters of `pauses`; yields as `autograd.backward`.

        Notes a failure; the backward pass then runs normally.
        """
        if dy is not None:
            self.failure = CaptureError("the optimizer passes `dy`")
        if self.failure is not None:
            return autograd.backward(loss, dy)
        kept = [(op, op.inputs, op.saved) for op in autograd.tape(loss)]
        capture = self.capture
        pairs: list[tuple[Tensor, Array]] = []
        try:
            capture.begin("backward")
            for param, grad in autograd.backward(loss):
                pairs.append((param, grad.array))
                if param in pauses:
                    self.pieces.append(Piece(capture.end(), pairs))
                    pairs = []
                    capture.begin("backward")
            last = capture.end()
            if pairs or last.nodes:
                self.pieces.append(Piece(last, pairs))
        except Exception as error:
            capture.abort()
            self.failure = error.with_traceback(None)  # its frames hold this step
            for op, inputs, saved in kept:  # released arrays are valid again: nothing has overwritten them
                op.inputs, op.saved = inputs, saved
        # Other arrays that the step read: if their owners drop them, a replay reads old values, not foreign ones.
        self._leaves = [source.array for _, inputs, _ in kept for source in inputs or () if not source.in_graph]
        return self._gradients() if self.failure is None else autograd.backward(loss)

    def finish(self, results: Any) -> Any:
        """Take the results of `train_one_batch`, and return them with copies of their tensors.

        Raises:
            CaptureError: a replay would not repeat this step.
        """
        if self._calls != 1:
            raise CaptureError(f"train_one_batch calls self.optimizer {self._calls} times, where a replay would once")
        if isinstance(self.failure, CaptureError):
            raise self.failure
        if self.failure is not None:
            raise CaptureError(f"the backward pass: {text_of(self.failure)}") from self.failure
        if not self.pieces:
            raise CaptureError("the optimizer did not call autograd.backward for its loss")
        self._check_results(results)
        self.results = results
        return _copied(results)

    def _check_results(self, results: Any) -> None:
        if type(results) in (tuple, list, dict):
            for value in results.values() if isinstance(results, dict) else results:
                self._check_results(value)
        elif isinstance(results, Tensor):
            if not self.capture.holds(results.array):
                raise CaptureError("train_one_batch returns a tensor that was not computed before the optimizer's step")
        elif results is not None:
            raise CaptureError(
                f"train_one_batch returns a {type(results).__name__}, which a replay would not compute again"
            )

    # -- replay ------------------------------------------------------------------------------------------------------
    def replay(self, optimizer: Any, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """One step with other arguments of the same kind; returns the results of `train_one_batch`."""
        assert self.call is not None
        given = (*inputs, *(options[key] for key in self.options))
        for own, value in zip((*self.inputs, *self.options.values()), given, strict=True):
            if isinstance(own, Tensor):
                own.array[...] = value.array
        self.capture.launch(self.forward)
        results = _copied(self.results)  # the next replay overwrites them
        self.call.on(optimizer, self._loss(autograd.CustomBackward(self._gradients, self._parameters)))
        for call in self.later:
            call.on(optimizer)
        return results

    def fits(self) -> bool:
        """Whether parameters, states and gradients are still at the captured addresses."""
        here = all(tensor.array is array for tensor, array in self._states)
        pairs = (pair for piece in self.pieces for pair in piece.pairs)
        return (
            here and not self._moved and all(param.grad is None or param.grad.array is array for param, array in pairs)
        )

    def _gradients(self, *_: object) -> Iterator[tuple[Tensor, Tensor]]:
        """Compute the backward pass, and yield as `autograd.backward`, whose arguments were those of the capture."""
        for work, pairs in self.pieces:
            self.capture.launch(work)
            for param, array in pairs:
                if param.grad is None:
                    param.grad = Tensor.of(array.copy(), self.device, requires_grad=False)
                    self._moved = True
                elif param.grad.array is not array:  # in another bucket; the next step is captured anew
                    param.grad.array[...] = array
                    self._moved = True
                yield param, param.grad

    def _parameters(self) -> list[Tensor]:
        """In the order in which `_gradients` yields them."""
        return [param for _, pairs in self.pieces for param, _ in pairs]


def _copied(value: Any) -> Any:
    """`value` with copies of its tensors."""
    if isinstance(value, Tensor):
        return Tensor.of(value.array.copy(), value.device)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_copied, value))
    return value


def early_text(call: OptimizerCall) -> str:
    """Why a step with this call, which comes before that with the loss, is not captured."""
    return f"train_one_batch calls self.optimizer.{call.name} before the forward pass is complete"


def text_of(error: Exception) -> str:
    """The kind of an error and its message."""
    return f"{type(error).__name__}: {error}"
