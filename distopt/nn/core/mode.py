"""Process-wide switches for operations and layers: training mode and recording."""

from __future__ import annotations

from typing import Any, NamedTuple


class Ran(NamedTuple):
    """An `Operation` that ran, its input tensors, and the resulting tensor."""

    op: Any
    inputs: tuple[Any, ...]
    out: Any


class Mode:
    """The state of this process.

    Attributes:
        loss_scale: factor of a loss in half precision, a power of two; see `distopt.nn.core.half`.
        freezes: number of times that a parameter was frozen or unfrozen; see `Tensor.requires_grad`.
        training: whether operations are recorded; set by `autograd.training`, `Model.train` and `Model.eval`.
        ran: while the forward pass of a step is recorded, the operations that have run, and descriptions of events that
            a replay would not repeat; else None.
        last_change: time of the last change of memory in place, see `distopt.nn.core.changes`.
    """

    freezes: int = 0
    training: bool = False
    loss_scale: float = 1024.0
    ran: list[Ran | str] | None = None
    last_change: int = -1


mode = Mode()
