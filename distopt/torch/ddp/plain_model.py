"""The model that DDP and `torch.compile` wrap."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..private import uncompiled


def plain_model(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Local. The model inside DDP and `torch.compile`, with its own names, and the DDP around it, if there is one."""
    ddp = None
    while True:
        if isinstance(model, DistributedDataParallel):
            ddp, model = model, model.module
        elif (inner := uncompiled(model)) is not model:
            model = inner
        else:
            return model, ddp
