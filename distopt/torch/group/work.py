"""Works, as PyTorch sees them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..private import current_backward_pass, untraced


@untraced
class WaitedWork(dist.Work):
    """Base of all works: subclasses add `wait` and `is_completed`.

    Args:
        tensors: the result.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._error: BaseException | None = None
        self._in_inference_mode = torch.is_inference_mode_enabled()

    def _as_called(self) -> AbstractContextManager[Any]:
        """Local. The inference mode of the call, which a thread that ends the work need not have."""
        if torch.is_inference_mode_enabled() == self._in_inference_mode:
            return nullcontext()
        mode: AbstractContextManager[Any] = torch.inference_mode(self._in_inference_mode)
        return mode

    def is_success(self) -> bool:
        """Local. Whether it has ended, and without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Local. Its error, if it has failed."""
        return self._error

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors that have been written; waits."""
        self.wait()
        return self._tensors


@untraced
class DoneWork(WaitedWork):
    """An operation that had ended when it was returned."""

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
    """Whether DDP's hook FP16_COMPRESS may want a future: of C++, it takes none whose value is a Python object."""
    return current_backward_pass() >= 0 and bool(tensors) and tensors[0].dtype == torch.float16


def typed(tensors: list[torch.Tensor]) -> Any:
    """A future that holds a list of C++. Python can make only such that have ended."""
    return torch.jit.fork(lambda: tensors)
