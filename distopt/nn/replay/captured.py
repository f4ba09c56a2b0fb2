"""A training step captured in CUDA graphs, and its replay; see `distopt.nn.replay.graphs`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from ..core import autograd
from ..core.array import Array
from ..core.tensor import Tensor
from ..devices.device import Device
from .step import Piece, RecordedStep


class _Recorder:
    """Records pieces of work on a stream of its own, in memory of its own, to be launched on CuPy's current stream.

    Attributes:
        memory: all memory allocated for the pieces; it lives as long as the recorder.
    """

    def __init__(self, device: Device) -> None:
        from ..kernels import gpu_base

        self._base, self._device = gpu_base, device
        self._cuda = cuda = device.xp.cuda
        self.memory: list[Any] = []
        self._pool = cuda.MemoryPool(_allocator(cuda, gpu_base.native, self.memory))
        # Non-blocking: other threads may use the default stream meanwhile.
        self._stream = cuda.Stream(non_blocking=True)
        self.launched_on = gpu_base.current_stream()
        self._inside: contextlib.ExitStack | None = None

    def own_memory(self) -> Any:
        """A context in which new arrays lie in the graph's memory."""
        return self._cuda.using_allocator(self._pool.malloc)

    def holds(self, array: Array) -> bool:
        address = array.data.ptr
        return any(run.ptr <= address < run.ptr + run.size for run in self.memory)

    def begin(self, what: str) -> None:
        """Record the work of this thread until `end`; until then, another stream is CuPy's current one."""
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
    """The allocator of a pool; all its memory stays in `memory`, even if the pool frees it."""

    def allocate(size: int) -> Any:
        # cudaMalloc does not enqueue work on a stream; but a capture forbids it, as it may wait for the device.
        memory.append(native.allow_in_capture(lambda: cuda.Memory(size)))
        return cuda.MemoryPointer(memory[-1], 0)

    return allocate


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: it could free CUDA memory, which fails during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CapturedStep(RecordedStep):
    """A step that was captured in CUDA graphs, or is about to be."""

    def __init__(
        self, device: Device, inputs: Sequence[Any], options: dict[str, Any], states: Iterable[Tensor]
    ) -> None:
        self.recorder = _Recorder(device)
        with self.recorder.own_memory():
            super().__init__(device, inputs, options, states)
        self._leaves: list[Array] = []

    def __str__(self) -> str:
        nodes = self.forward.nodes + sum(piece.work.nodes for piece in self.pieces)
        return f"captured in {1 + len(self.pieces)} CUDA graphs of {nodes} nodes"

    @property
    def begun(self) -> bool:
        return self.forward is not None

    def begin(self) -> None:
        self.recorder.begin("forward")

    def abort(self) -> None:
        self.recorder.abort()

    def end_forward(self, loss: Tensor) -> None:
        self.forward = self.recorder.end()
        self.launch(self.forward)

    def record_backward(self, loss: Tensor, pauses: Container[object]) -> Iterator[tuple[Tensor, Tensor]]:
        kept = [(op, op.inputs, op.saved) for op in autograd.tape(loss)]
        recorder = self.recorder
        pairs: list[tuple[Tensor, Array]] = []
        try:
            recorder.begin("backward")
            for param, grad in autograd.backward(loss):
                pairs.append((param, grad.array))
                if param in pauses:
                    self.pieces.append(Piece(recorder.end(), pairs))
                    pairs = []
                    recorder.begin("backward")
            last = recorder.end()
            if pairs or last.nodes:
                self.pieces.append(Piece(last, pairs))
        except Exception as error:
            recorder.abort()
            self.failure = error.with_traceback(None)  # its frames hold this step
            for op, inputs, saved in kept:  # released arrays are valid again: nothing has overwritten them
                op.inputs, op.saved = inputs, saved
        # Other arrays that the step read: if their owners drop them, a replay reads old values, not foreign ones.
        self._leaves = [source.array for _, inputs, _ in kept for source in inputs or () if not source.in_graph]
        return self.gradients() if self.failure is None else autograd.backward(loss)

    def computed(self, tensor: Tensor) -> bool:
        return self.recorder.holds(tensor.array)

    def launch(self, work: Any) -> None:
        work.launch(self.recorder.launched_on)
