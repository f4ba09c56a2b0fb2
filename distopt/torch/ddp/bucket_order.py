"""Saves and restores the layout of DDP's buckets, since the bits of sums may depend on it.

DDP first lays out its buckets in the order of the model's parameters. At its second forward pass it repeats this in
the order in which gradients became ready in the first backward pass. A ring, as in Gloo or NCCL, starts the sum of an
element at a rank that depends on the place of the element in its bucket. So a job that resumes needs its old layout for
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..private import parameters_by_bucket, rebuild_buckets

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def bucket_order(ddp: DistributedDataParallel) -> list[str]:
    """Collective the first time, then local. The names of the parameters in the order of the next step's buckets.

    If a new layout is due at the next forward pass, DDP makes it now.
    """
    rebuild_buckets(ddp)
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [names[id(parameter)] for parameter in parameters_by_bucket(ddp)]


def lay_out(ddp: DistributedDataParallel, order: Sequence[str]) -> None:
    """Collective. Have DDP lay out its buckets in `order`: it sees idle passes with gradients ready in this order.

    Parameters keep their gradients.
    """
    model = ddp.module
    parameters = dict(model.named_parameters())
    if not order or set(order) - parameters.keys() or order == bucket_order(ddp):
        return
    kept = {name: parameters[name].grad for name in order}
    ddp.module = Idle([parameters[name] for name in order])
    sends_buffers, ddp.forward_sync_buffers = ddp.forward_sync_buffers, False  # the idle module has no buffers
    try:
        for _ in range(2 if ddp.static_graph else 1):  # DDP watches the last pass
            ddp(parameters[order[0]].detach()).backward()
    finally:
        ddp.module, ddp.forward_sync_buffers = model, sends_buffers
    bucket_order(ddp)
    for name, grad in kept.items():
        parameters[name].grad = grad


class Idle(nn.Module):
    """The module of DDP in idle passes: zero from all parameters. The gradient of the one added last is ready first."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._parameters_by_readiness = parameters

    def forward(self, like: torch.Tensor) -> torch.Tensor:
        """Local. Zero, a tensor [] on the device of `like`, from which all parameters get gradients of zero."""
        total = torch.zeros((), device=like.device)
        for parameter in reversed(self._parameters_by_readiness):
            total = total + parameter.sum() * 0
        return total
