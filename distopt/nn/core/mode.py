"""Process-wide switches for operations and layers."""

from __future__ import annotations


class Mode:
    """The state of this process.

    Attributes:
        loss_scale: factor of a loss in half precision, a power of two; see `distopt.nn.core.half`.
        freezes: number of times that a parameter was frozen or unfrozen; see `Tensor.requires_grad`.
        training: whether operations are recorded; set by `autograd.training`, `Model.train` and `Model.eval`.
        initialized: the layers that their first call has initialized, while a model is compiled; else None.
        last_change: time of the last change of memory in place, see `distopt.nn.core.changes`.
    """

    freezes: int = 0
    training: bool = False
    initialized: list[object] | None = None
    loss_scale: float = 1024.0
    last_change: int = -1


mode = Mode()
