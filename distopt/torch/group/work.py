"""Works: the handles that collectives and messages return."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..private import current_backward_pass, untraced


@untraced
class WaitedWork(dist.Work):
    """The base of all works. Subclasses define `wait` and `is_completed`.

    Args:
        tensors: the tensors that the operation writes.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._error: BaseException | None = None
        self._in_inference_mode = torch.is_inference_mode_enabled()

    def _as_called(self) -> AbstractContextManager[Any]:
        """Local. A context with the inference mode of the call: another thread, in another mode, may end the work."""
        if torch.is_inference_mode_enabled() == self._in_inference_mode:
            return nullcontext()
        mode: AbstractContextManager[Any] = torch.inference_mode(self._in_inference_mode)
        return mode

    def is_success(self) -> bool:
        """Local. Whether it has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Local. Its error, if it has failed."""
        return self._error

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that the operation has written."""
        self.wait()
        return self._tensors


@untraced
class CompletedWork(WaitedWork):
    """The work of an operation that has ended before the call returns."""

    def is_completed(self) -> bool:
        """Local. True."""
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Local. A future that holds the tensors."""
        if of_a_hook(self._tensors):
            return typed(self._tensors)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def of_a_hook(tensors: list[torch.Tensor]) -> bool:
    """Whether DDP's hook FP16_COMPRESS may ask for a future: its C++ cannot read one whose value is a Python object."""
    return current_backward_pass() >= 0 and bool(tensors) and tensors[0].dtype == torch.float16


def typed(tensors: list[torch.Tensor]) -> Any:
    """A future whose value is a list in C++. Python can make only futures that have ended."""
    return torch.jit.fork(lambda: tensors)
