"""DDP's buckets, laid out as they were: in another layout a library may add the ranks' gradients in another order.

DDP lays out its buckets by the order of the model's parameters, and anew at its second forward pass, by the order in
which gradients became ready in the first backward pass. Rings, such as those of Gloo and NCCL, begin the sum of an
element at a rank that depends on its place in the bucket. So a job that resumes must sum its first step in the layout
that it had.
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
    """Collective, once; then local. Names of the parameters in the order of the buckets in which the next step sums.

    Where the new layout is due at the next forward pass, it is made now.
    """
    rebuild_buckets(ddp)
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [names[id(parameter)] for parameter in parameters_by_bucket(ddp)]


def lay_out(ddp: DistributedDataParallel, order: Sequence[str]) -> None:
    """Collective. Have DDP lay out its buckets by `order`, by idle passes in which gradients become ready in it.

    Parameters keep their gradients.
    """
    model = ddp.module
    parameters = dict(model.named_parameters())
    if not order or set(order) - parameters.keys() or order == bucket_order(ddp):
        return
    kept = {name: parameters[name].grad for name in order}
    ddp.module = _Idle([parameters[name] for name in order])
    sends_buffers, ddp.forward_sync_buffers = ddp.forward_sync_buffers, False  # the idle module has none
    try:
        for _ in range(2 if ddp.static_graph else 1):  # DDP watches the last of them
            ddp(parameters[order[0]].detach()).backward()
    finally:
        ddp.module, ddp.forward_sync_buffers = model, sends_buffers
    bucket_order(ddp)
    for name, grad in kept.items():
        parameters[name].grad = grad


class _Idle(nn.Module):
    """Zero, through all parameters: what was added last becomes ready first."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._parameters_by_readiness = parameters

    def forward(self, like: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=like.device)
        for parameter in reversed(self._parameters_by_readiness):
            total = total + parameter.sum() * 0
        return total
