"""Recording and replay of training steps: on a GPU as CUDA graphs, on the CPU as calls of kernels.

For the CPU, see `distopt.nn.replay.replayed`. On a GPU, the forward pass is captured, and so is the backward pass, in
pieces that end at the parameters that complete a bucket (piecewise CUDA graphs). The optimizer's collectives, checks,
codecs and updates are not captured, because they use values on the host and wait for the device. A replay
launches the forward piece, then calls the optimizer method that `train_one_batch` called. That method's
`autograd.backward` launches the remaining pieces in turn and yields the gradients of each. The optimizer needs no
changes, and communication overlaps the remaining pieces.

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
from ..notices import tell_once
from .captured import CapturedStep
from .replayed import ReplayedStep
from .step import CaptureError, OptimizerCall, RecordedStep, early_text, text_of

# Steps before the first recording, in which momentum, buckets, plans and compiled kernels are created.
REHEARSALS = {"cpu": 1, "cuda": 2}
KINDS = 8  # most kinds of arguments; each kind has memory of its own
CAPTURES = 3  # most recordings of one kind: each follows a move of parameters or buckets

_log = logging.getLogger("distopt")


class _Watched:
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
    """One kind of arguments: the attempts to record it, and the recorded step or the reason why there is none."""

    def __init__(self) -> None:
        self.rehearsals = self.captures = 0
        self.step: RecordedStep | None = None
        self.candidate: ReplayedStep | None = None  # becomes the step if the next one does the same
        self.reason = ""


class StepGraphs:
    """The recorded training steps of a model.

    Attributes:
        replays: number of steps that were replayed.
        watch: while a step is observed, makes the object that stands in for the optimizer.
    """

    def __init__(self, device: Device) -> None:
        self.replays = 0
        self.watch: Callable[[Any], Any] | None = None
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
        """Run one training step: replay it or record it where possible.

        Args:
            train: `train_one_batch`.
            states: gives the tensors of the model.
            optimizer: of the model.
            inputs: arguments of `train`.
            options: likewise, by keyword.
        """
        if self._device.recording or mode.ran is not None:  # a model within a model that is recorded
            return train(*inputs, **options)
        try:
            kind = self._kind_of(inputs, options)
        except CaptureError as error:
            self._tell(error)
            return train(*inputs, **options)
        if kind.step is not None and not kind.step.fits():
            kind.step = None
            if kind.captures == CAPTURES:
                kind.reason = f"parameters or buckets were moved after each of {CAPTURES} recordings"
                self._tell(kind.reason)
        if kind.step is not None:
            self.replays += 1
            return kind.step.replay(optimizer, inputs, options)
        if kind.reason:
            return train(*inputs, **options)
        if kind.rehearsals < REHEARSALS[self._device.kind]:
            return self._rehearse(kind, train, inputs, options)
        return self._record(kind, train, states, inputs, options)

    def _kind_of(self, inputs: Sequence[Any], options: dict[str, Any]) -> _Kind:
        named: list[tuple[int | str, Any]] = [*enumerate(inputs), *sorted(options.items())]
        key = (self._stream(), *[self._trait(name, value) for name, value in named])
        try:
            kind = self._kinds.get(key)
        except TypeError as error:
            raise CaptureError(f"arguments of train_one_batch must be tensors or have a hash ({error})") from None
        if kind is None:
            if len(self._kinds) == KINDS:
                raise CaptureError(f"there were {KINDS} kinds of arguments of train_one_batch already")
            kind = self._kinds[key] = _Kind()
        return kind

    def _stream(self) -> int:
        if self._device.kind == "cpu":
            return 0
        from ..kernels.gpu_base import current_stream

        return current_stream()

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

        with self._watching(seen):
            results = train(*inputs, **options)
        kind.rehearsals += 1
        losses = sum(call.place is not None for call in calls)
        if losses != 1:
            kind.reason = _calls_text(losses)
        elif calls[0].place is None:
            kind.reason = early_text(calls[0])
        if kind.reason:
            self._tell(kind.reason)
        return results

    def _record(
        self,
        kind: _Kind,
        train: Callable[..., Any],
        states: Callable[[], dict[str, Tensor]],
        inputs: Sequence[Any],
        options: dict[str, Any],
    ) -> Any:
        step_type = ReplayedStep if self._device.kind == "cpu" else CapturedStep
        step = step_type(self._device, inputs, options, states().values())
        failure = _calls_text(0)
        try:
            with self._watching(step.seen):
                step.begin()
                results = train(*step.inputs, **step.options)
        except Exception as error:
            if step.begun:
                raise  # the error is none of the recording
            failure = f"the forward pass: {text_of(error)}"
        finally:
            step.abort()
        try:
            if not step.begun:
                results = train(*inputs, **options)  # raises where the error was the script's
                raise CaptureError(failure)
            step.check(results)
            if isinstance(step, ReplayedStep) and self._is_first(kind, step):
                return step.hand_out()
        except CaptureError as error:
            kind.reason = str(error)
            self._tell(kind.reason)
            return results
        kind.step, kind.captures = step, kind.captures + 1
        _log.info("training step %s", step)
        return step.hand_out()

    @staticmethod
    def _is_first(kind: _Kind, step: ReplayedStep) -> bool:
        """Whether this is the first recorded step of its kind, with none to compare it with.

        Raises:
            CaptureError: an earlier one did something else.
        """
        earlier, kind.candidate = kind.candidate, step
        if earlier is None:
            return True
        kind.candidate = None
        if difference := step.difference(earlier):
            raise CaptureError(f"train_one_batch does not do the same in each step: {difference}")
        return False

    @contextlib.contextmanager
    def _watching(self, seen: Callable[[Any, OptimizerCall], Any]) -> Iterator[None]:
        self.watch = lambda optimizer: _Watched(optimizer, seen)
        try:
            yield
        finally:
            self.watch = None

    @staticmethod
    def _tell(reason: object) -> None:
        tell_once(f"use_graph=True: training steps run without a graph: {reason}")


def _calls_text(calls: int) -> str:
    return f"train_one_batch calls self.optimizer with a loss {calls} times, where one is needed"
