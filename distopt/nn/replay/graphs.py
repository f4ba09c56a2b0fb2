"""Training steps as CUDA graphs: when they are captured, and when they are replayed.

The forward pass is captured, and so is the backward pass, in pieces that end at the parameters that complete a bucket
(piecewise CUDA graphs). The optimizer's collectives, checks, codecs and updates are not captured, because they use
values on the host and wait for the device. A replay launches the forward piece, then calls the optimizer method that
`train_one_batch` called. That method's `autograd.backward` launches the remaining pieces in turn and yields the
gradients of each. The optimizer needs no changes, and communication overlaps the remaining pieces.

The first calls with one kind of arguments run normally, and the next one is captured. Nothing runs on the GPU while a
piece is captured; each piece is launched as soon as its results are needed, so this call also is a complete step. If
capturing the forward pass fails, nothing has run yet, and the call starts again without a capture. If capturing the
backward pass fails, everything it needs still exists, and it runs normally. That kind of arguments is then not tried
again, and the log states the reason.

A graph's arrays are in memory of its own, so a replay never overwrites memory that has been reused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from ..core.mode import mode
from ..core.tensor import Tensor
from ..devices.device import Device
from ..notices import log_once
from .step import CapturedStep, CaptureError, OptimizerCall, early_text, text_of

REHEARSALS = 2  # steps before the first capture, in which momentum, buckets, plans and compiled kernels are created
KINDS = 8  # most kinds of arguments; each kind has memory of its own
CAPTURES = 3  # most captures of one kind: each follows a move of parameters or buckets

_log = logging.getLogger("distopt")


class _Observed:
    """An optimizer whose methods report their calls to `seen`."""

    def __init__(self, optimizer: Any, seen: Callable[[Any, OptimizerCall], Any]) -> None:
        object.__setattr__(self, "_optimizer", optimizer)
        object.__setattr__(self, "_seen", seen)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._optimizer, name)
        if not isinstance(value, MethodType):
            return value
        return lambda *args, **options: self._call(name, args, options)

    def __setattr__(self, name: str, value: object) -> None:
        self._call("__setattr__", (name, value), {})

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call("__call__", args, options)

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        places: list[tuple[int | str, Any]] = [*enumerate(args), *options.items()]
        losses = [place for place, value in places if isinstance(value, Tensor) and value.in_graph]
        return self._seen(self._optimizer, OptimizerCall(name, dict(places), losses[0] if losses else None))


class _Kind:
    """One kind of arguments: the attempts to capture it, and the captured step or the reason why there is none."""

    def __init__(self) -> None:
        self.rehearsals = self.captures = 0
        self.step: CapturedStep | None = None
        self.reason = ""


class StepGraphs:
    """The captured training steps of a model on a GPU.

    Attributes:
        replays: number of steps that were replayed.
        observe: during an observed step, wraps the optimizer in an object that reports its calls; else None.
    """

    def __init__(self, device: Device) -> None:
        self.replays = 0
        self.observe: Callable[[Any], Any] | None = None
        self._device = device
        self._generation = self._current()
        self._kinds: dict[Any, _Kind] = {}

    def _current(self) -> tuple[int, int]:
        return self._device.graph_generation, mode.freezes

    def fits(self) -> bool:
        """Whether, since this object was made, no graph was reset and no parameter frozen or unfrozen."""
        return self._generation == self._current()

    def run(
        self,
        train: Callable[..., Any],
        states: Callable[[], dict[str, Tensor]],
        optimizer: Any,
        inputs: Sequence[Any],
        options: dict[str, Any],
    ) -> Any:
        """Run one training step: replay it or capture it where possible.

        Args:
            train: `train_one_batch`.
            states: gives the tensors of the model.
            optimizer: of the model.
            inputs: arguments of `train`.
            options: likewise, by keyword.
        """
        if self._device.capturing:  # a model within a model that is captured
            return train(*inputs, **options)
        try:
            kind = self._kind_of(inputs, options)
        except CaptureError as error:
            self._log_reason(error)
            return train(*inputs, **options)
        if kind.step is not None and not kind.step.fits():
            kind.step = None
            if kind.captures == CAPTURES:
                kind.reason = f"parameters or buckets were moved after each of {CAPTURES} captures"
                self._log_reason(kind.reason)
        if kind.step is not None:
            self.replays += 1
            return kind.step.replay(optimizer, inputs, options)
        if kind.reason:
            return train(*inputs, **options)
        if kind.rehearsals < REHEARSALS:
            return self._rehearse(kind, train, inputs, options)
        return self._capture(kind, train, states, inputs, options)

    def _kind_of(self, inputs: Sequence[Any], options: dict[str, Any]) -> _Kind:
        named: list[tuple[int | str, Any]] = [*enumerate(inputs), *sorted(options.items())]
        key = (self._device.xp.cuda.get_current_stream().ptr, *[self._trait(name, value) for name, value in named])
        try:
            kind = self._kinds.get(key)
        except TypeError as error:
            raise CaptureError(f"arguments of train_one_batch must be tensors or have a hash ({error})") from None
        if kind is None:
            if len(self._kinds) == KINDS:
                raise CaptureError(f"there were {KINDS} kinds of arguments of train_one_batch already")
            kind = self._kinds[key] = _Kind()
        return kind

    def _trait(self, name: int | str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return name, type(value), value
        if value.device is not self._device or value.in_graph or value.stores_grad:
            raise CaptureError(f"argument {name} of train_one_batch is not a plain tensor on {self._device!r}")
        return name, value.shape, value.dtype.str

    def _rehearse(self, kind: _Kind, train: Callable[..., Any], inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run normally, and check whether the step could be captured."""
        calls: list[OptimizerCall] = []

        def seen(optimizer: Any, call: OptimizerCall) -> Any:
            calls.append(call)
            return call.on(optimizer)

        with self._observing(seen):
            results = train(*inputs, **options)
        kind.rehearsals += 1
        losses = sum(call.place is not None for call in calls)
        if losses != 1:
            kind.reason = _calls_text(losses)
        elif calls[0].place is None:
            kind.reason = early_text(calls[0])
        if kind.reason:
            self._log_reason(kind.reason)
        return results

    def _capture(
        self,
        kind: _Kind,
        train: Callable[..., Any],
        states: Callable[[], dict[str, Tensor]],
        inputs: Sequence[Any],
        options: dict[str, Any],
    ) -> Any:
        step = CapturedStep(self._device, inputs, options, states().values())
        failure = _calls_text(0)
        try:
            with self._observing(step.seen):
                step.capture.begin("forward")
                results = train(*step.inputs, **step.options)
        except Exception as error:
            if step.forward is not None:
                raise  # the error does not come from the capture
            failure = f"the forward pass: {text_of(error)}"
        finally:
            step.capture.abort()
        try:
            if step.forward is None:
                results = train(*inputs, **options)  # raises the script's own error, if it was one
                raise CaptureError(failure)
            results = step.finish(results)
        except CaptureError as error:
            kind.reason = str(error)
            self._log_reason(kind.reason)
            return results
        kind.step, kind.captures = step, kind.captures + 1
        _log.info("training step %s", step)
        return results

    @contextlib.contextmanager
    def _observing(self, seen: Callable[[Any, OptimizerCall], Any]) -> Iterator[None]:
        self.observe = lambda optimizer: _Observed(optimizer, seen)
        try:
            yield
        finally:
            self.observe = None

    @staticmethod
    def _log_reason(reason: object) -> None:
        log_once(f"use_graph=True: training steps run without a graph: {reason}")


def _calls_text(calls: int) -> str:
    return f"train_one_batch calls self.optimizer with a loss {calls} times, where one is needed"
