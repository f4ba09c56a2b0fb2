"""SINGA's `model` module."""

from __future__ import annotations

from .. import launch
from ..checks import explain_absent
from ..nn import model
from ..nn.notices import log_once
from ..nn.optim.optimizer import Optimizer

__all__ = ["Model"]


class Model(model.Model):  # noqa: D101 - its documentation is that of its base
    __doc__ = model.Model.__doc__

    def _attach(self) -> None:
        super()._attach()
        if self._compiled and isinstance(self._optimizer, Optimizer):
            rank, world_size = launch.rank_and_size()
            if rank == 1:  # one line is enough; rank 0 alone may train on purpose
                log_once(
                    f"{world_size} ranks train a {type(self).__name__} without DistOpt, each for itself; average their "
                    "gradients by set_optimizer(opt.DistOpt(optimizer))"
                )


explain_absent(globals(), __all__)
