"""One training step that is captured in CUDA graphs, and replayed; see `distopt.graph`."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any, NamedTuple

from . import autograd
from .errors import DistoptError
from .tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from .device import Device
    from .tensor import Array

__all__ = ["CaptureError", "OptimizerCall", "Step", "copies", "early_text", "text_of"]


class CaptureError(DistoptError):
    """A step cannot be captured; the message says why."""


class _Piece(NamedTuple):
    """Work of the backward pass, and whose gradients are final after it: parameter, and where it was written."""

    work: Any
    pairs: list[tuple[Tensor, Array]]


class OptimizerCall(NamedTuple):
    """A call of a method of the optimizer; `place` is that of the loss, an index or a keyword, or None without one."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    place: int | str | None

    def on(self, optimizer: Any, loss: Tensor | None = None) -> Any:
        """The same call, of another optimizer, and with another loss if one is given."""
        args, options = list(self.args), dict(self.options)
        if loss is not None and isinstance(self.place, int):
            args[self.place] = loss
        elif loss is not None and isinstance(self.place, str):
            options[self.place] = loss
        return getattr(optimizer, self.name)(*args, **options)

    @property
    def loss(self) -> Tensor:
        """The loss of the call itself."""
        loss: Tensor = self.args[self.place] if isinstance(self.place, int) else self.options[str(self.place)]
        return loss


class _Recorder:
    """Records pieces on a stream of its own, for another one, in memory of its own.

    Attributes:
        memory: all that was allocated, which lasts as long as this.
    """

    def __init__(self, device: Device) -> None:
        from .ops import gpu_base

        self._base, self._device = gpu_base, device
        self._cuda = cuda = device.xp.cuda
        self.memory: list[Any] = []
        self._pool = cuda.MemoryPool(_allocator(cuda, gpu_base.native, self.memory))
        # One that does not block: other threads may use the default stream meanwhile.
        self._stream = cuda.Stream(non_blocking=True)
        self.launched_on = gpu_base.current_stream()
        self._inside: contextlib.ExitStack | None = None

    def own_memory(self) -> Any:
        """Within this, new arrays lie in the graph's memory."""
        return self._cuda.using_allocator(self._pool.malloc)

    def holds(self, array: Array) -> bool:
        address = array.data.ptr
        return any(run.ptr <= address < run.ptr + run.size for run in self.memory)

    def begin(self, what: str) -> None:
        """Record what this thread puts on CuPy's current stream, which is another one until `end`."""
        with contextlib.ExitStack() as inside:
            inside.enter_context(_no_collection())
            inside.enter_context(self._stream)
            inside.enter_context(self.own_memory())
            self._base.share_workspace(self._device.id(), self._stream.ptr, self.launched_on)
            inside.callback(self._base.share_workspace, self._device.id(), self._stream.ptr, None)
            self._device.recording = what
            inside.callback(setattr, self._device, "recording", "")
            self._base.native.begin_capture(self._stream.ptr)
            self._inside = inside.pop_all()

    def end(self) -> Any:
        """The recorded piece."""
        try:
            piece = self._base.native.end_capture(self._stream.ptr)
        except Exception:
            self.abort()
            raise
        self._leave()
        return piece

    def abort(self) -> None:
        """Leave no recording under way."""
        if self._inside is not None:
            self._base.native.abort_capture(self._stream.ptr)
            self._leave()

    def _leave(self) -> None:
        assert self._inside is not None
        inside, self._inside = self._inside, None
        inside.close()


def _allocator(cuda: Any, native: Any, memory: list[Any]) -> Callable[[int], Any]:
    """What a pool takes its memory from; all of it stays in `memory`, even if the pool lets go of it."""

    def allocate(size: int) -> Any:
        # cudaMalloc is no work of a stream; but a capture forbids it, as it may wait for the device.
        memory.append(native.allow_in_capture(lambda: cuda.Memory(size)))
        return cuda.MemoryPointer(memory[-1], 0)

    return allocate


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage may hold memory of CUDA, and to free it fails within a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Step:
    """A step that was captured, or is about to be.

    Attributes:
        later: calls of the optimizer that follow the one with the loss, such as `step`.
        results: of `train_one_batch`; arrays of the graph.
        moved: whether a gradient is wanted elsewhere than it was at the capture.
        failure: why the backward pass could not be captured.
    """

    def __init__(self, device: Device, inputs: Sequence[Any], options: dict[str, Any]) -> None:
        self.device, self.recorder = device, _Recorder(device)
        with self.recorder.own_memory():
            self.inputs = [_twin(value) for value in inputs]
            self.options = {key: _twin(value) for key, value in options.items()}
        self.forward: Any = None
        self.call: OptimizerCall | None = None
        self.calls = 0
        self.later: list[OptimizerCall] = []
        self.pieces: list[_Piece] = []
        self.states: list[tuple[Tensor, Array]] = []
        self.leaves: list[Array] = []
        self.results: Any = None
        self.moved = False
        self.failure: Exception | None = None

    # -- capture -----------------------------------------------------------------------------------------------------
    def seen(self, optimizer: Any, call: OptimizerCall) -> Any:
        """The optimizer is called; the first time with a loss, the forward pass is complete."""
        if call.place is None and self.calls:
            self.later.append(call)
            return call.on(optimizer)
        if call.place is None:
            raise CaptureError(early_text(call))
        self.calls += 1
        if self.calls > 1:
            return call.on(optimizer)
        self.forward = self.recorder.end()
        self.call = call
        self.forward.launch(self.recorder.launched_on)
        loss = Tensor(data=call.loss.data, device=self.device)
        loss.creator = _Capturing(self, call.loss)
        return call.on(optimizer, loss)

    def record_backward(self, loss: Tensor, pauses: Collection[Tensor]) -> None:
        """Record the backward pass, in pieces that end at the parameters of `pauses`; nothing runs."""
        kept = [(op, op.inputs, op.saved) for op in autograd.tape(loss)]
        recorder = self.recorder
        pairs: list[tuple[Tensor, Array]] = []
        try:
            recorder.begin("backward")
            for param, grad in autograd.backward(loss):
                pairs.append((param, grad.data))
                if param in pauses:
                    self.pieces.append(_Piece(recorder.end(), pairs))
                    pairs = []
                    recorder.begin("backward")
            last = recorder.end()
            if pairs or last.nodes:
                self.pieces.append(_Piece(last, pairs))
        except Exception as error:
            recorder.abort()
            self.failure = error.with_traceback(None)  # its frames hold this step
            for op, inputs, saved in kept:  # what was let go of serves again: nothing has overwritten it
                op.inputs, op.saved = inputs, saved
        # What the step read besides: should its owner let go of it, a replay reads old values, and no foreign ones.
        self.leaves = [source.data for _, inputs, _ in kept for source in inputs or () if source.creator is None]

    def check(self, results: Any) -> None:
        """Take the results of `train_one_batch`.

        Raises:
            CaptureError: a replay would not do what this step did.
        """
        if self.calls != 1:
            raise CaptureError(f"train_one_batch calls self.optimizer {self.calls} times, where a replay would once")
        if self.failure is not None:
            raise CaptureError(f"the backward pass: {text_of(self.failure)}") from self.failure
        if not self.pieces:
            raise CaptureError("the optimizer did not call autograd.backward for its loss")
        _check_results(results, self.recorder)
        self.results = results

    # -- replay ------------------------------------------------------------------------------------------------------
    def fits(self) -> bool:
        """Whether parameters and states lie where they did."""
        return not self.moved and all(tensor.data is array for tensor, array in self.states)

    def replay(self, optimizer: Any, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """One step with other arguments of the same kind; its results are copies."""
        assert self.call is not None
        given = zip(
            (*self.inputs, *self.options.values()), (*inputs, *(options[key] for key in self.options)), strict=True
        )
        for own, value in given:
            if isinstance(own, Tensor):
                own.data[...] = value.data
        self.forward.launch(self.recorder.launched_on)
        loss = Tensor(data=self.call.loss.data, device=self.device)
        loss.creator = _Replaying(self)
        self.call.on(optimizer, loss)
        for call in self.later:
            call.on(optimizer)
        return copies(self.results)

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Launch the pieces of the backward pass, and yield as `autograd.backward`."""
        for work, pairs in self.pieces:
            work.launch(self.recorder.launched_on)
            for param, array in pairs:
                if param.grad is None:
                    param.grad = Tensor(data=array.copy(), device=self.device, requires_grad=False)
                    self.moved = True
                elif param.grad.data is not array:  # another bucket: right all the same, and the next step is captured
                    param.grad.data[...] = array
                    self.moved = True
                yield param, param.grad


class _Capturing(autograd.Walk):
    """Behind the loss of the step that is captured."""

    def __init__(self, step: Step, loss: Tensor) -> None:
        self.step, self.loss = step, loss

    def pairs(self, dy: Tensor | None, pauses: Collection[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        if dy is not None:
            self.step.failure = CaptureError("the optimizer passes `dy`")
        else:
            self.step.record_backward(self.loss, pauses)
        if self.step.failure is None:
            return self.step.gradients()
        return autograd.backward(self.loss, dy)

    def parameters(self) -> list[Tensor]:
        return autograd.gradient_order(self.loss)


class _Replaying(autograd.Walk):
    """Behind the loss of a replay."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def pairs(self, dy: Tensor | None, pauses: Collection[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return self.step.gradients()

    def parameters(self) -> list[Tensor]:
        return [param for piece in self.step.pieces for param, _ in piece.pairs]


def _twin(value: Any) -> Any:
    return Tensor(data=value.data.copy(), device=value.device) if isinstance(value, Tensor) else value


def copies(results: Any) -> Any:
    """`results` of `train_one_batch` with copies of their tensors, which later replays leave alone."""
    if isinstance(results, Tensor):
        return _twin(results)
    if isinstance(results, dict):
        return {key: copies(value) for key, value in results.items()}
    if isinstance(results, (tuple, list)):
        return type(results)(copies(value) for value in results)
    return results


def _check_results(results: Any, recorder: _Recorder) -> None:
    if type(results) in (tuple, list, dict):
        for value in results.values() if isinstance(results, dict) else results:
            _check_results(value, recorder)
    elif isinstance(results, Tensor):
        if not recorder.holds(results.data):
            raise CaptureError("train_one_batch returns a tensor that was not computed before the optimizer's step")
    elif results is not None:
        raise CaptureError(f"train_one_batch returns a {type(results).__name__}, which a replay would not compute anew")


def early_text(call: OptimizerCall) -> str:
    """Why a step with this call, which comes before that with the loss, is not captured."""
    return f"train_one_batch calls self.optimizer.{call.name} before the forward pass is complete"


def text_of(error: Exception) -> str:
    """The kind of an error and what it says."""
    return f"{type(error).__name__}: {error}"
