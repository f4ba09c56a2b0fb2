"""Accumulation: the gradients of several losses, added up for one update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ...errors import UsageError
from ..core.array import Array
from ..core.tensor import Tensor


class GradientAccumulation:
    """The sums of gradients that an optimizer has collected inside `no_sync`. All methods are local.

    Attributes:
        active: whether a loss only adds its gradients.
        sums: the sum of each parameter's gradients, until a step takes them.
    """

    def __init__(self) -> None:
        self.active = False
        self.sums: dict[Tensor, Array] = {}

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Make `active` true in the body of a `with`, which may be nested."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    def add(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add the gradients that a backward pass yields."""
        for param, grad in list(pairs):  # the whole pass first: a pass that fails adds nothing
            if param in self.sums:
                self.sums[param] += grad.array
            else:
                self.sums[param] = grad.array.copy()

    def taken(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pairs with the sums added to them, then the sums of other parameters; there are none afterwards."""
        sums, self.sums = self.sums, {}
        for param, grad in pairs:
            if param in sums:
                grad.array += sums.pop(param)
            yield param, grad
        for param, array in sums.items():
            if not param.requires_grad:  # frozen since its gradient was added
                continue
            if param.grad is None:
                param.grad = Tensor.of(array, param.device, requires_grad=False)
            else:
                param.grad.array[...] = array
            yield param, param.grad

    def check_empty(self) -> None:
        """Check that no sums wait for an update: states do not include them.

        Raises:
            UsageError: sums are waiting.
        """
        if self.sums:
            raise UsageError(
                "there are gradients of no_sync that no update has used yet; save states after the next step outside it"
            )
