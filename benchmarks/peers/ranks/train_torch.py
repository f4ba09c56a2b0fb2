"""A network in PyTorch's DistributedDataParallel.

Of the setup, "group" names the process group, Gloo's or distopt's; without one, the bare model is trained. The settings are
the default ones, or with "tuned" the fastest known for a CPU; "bfloat16" adds autocast, "hook" a hook of
DistributedDataParallel: "fp16", "power-sgd", "nothing", which leaves gradients as they are and moves no bytes, or "waiting",
which sums one element of each bucket. With "fsdp2", FSDP2 takes the place of DistributedDataParallel. With
"profile", the phases of the collectives of a group of distopt are recorded.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import train
from .libraries import join_torch
from .networks_torch import build
from .phases import count_seconds


class Trainer(train.Trainer):
    """Ready for its first step."""

    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        tuned, bfloat16, group = setup.get("tuned", False), setup.get("bfloat16", False), setup.get("group", "")
        self.rank = join_torch(setup, rank, world_size) if group else rank
        images, labels = train.synthetic_batch(setup, self.rank)
        self._x, self._y = torch.from_numpy(images), torch.from_numpy(labels).long()
        self._net = build(setup.get("model", "cnn"), tuned=tuned)
        self.about = f"torch {torch.__version__}{', tuned' if tuned else ''}{', bfloat16 autocast' if bfloat16 else ''}"
        if tuned:
            self._x = self._x.contiguous(memory_format=torch.channels_last)
            nn.utils.convert_conv2d_weight_memory_format(self._net, torch.channels_last)
        if setup.get("fsdp2"):
            from torch.distributed.fsdp import fully_shard

            for part in (*filter(_has_parameters, self._net), self._net):
                fully_shard(part)
            self.about += f", FSDP2 over {group}"
        elif group:
            hook = setup.get("hook", "")
            # With several buckets Gloo aborts in the hook of PowerSGD (torch 2.13), probably because its second
            # all-reduces start in another order on each rank. A cap given by hand makes one bucket of all.
            cap = 25 if hook == "power-sgd" else None
            self._net = nn.parallel.DistributedDataParallel(
                self._net,
                static_graph=tuned,
                gradient_as_bucket_view=tuned,
                broadcast_buffers=not tuned and hook not in ("nothing", "waiting"),
                bucket_cap_mb=cap,
            )
            _add_hook(self._net, hook)
            self.about += f", DistributedDataParallel over {group}"
        self._sgd = torch.optim.SGD(
            self._net.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5, fused=tuned or None
        )
        self._keep_gradients = tuned
        self._autocast = partial(torch.autocast, "cpu", torch.bfloat16) if bfloat16 else nullcontext
        self._criterion = nn.CrossEntropyLoss()
        if setup.get("profile") and group == "distopt":
            self.calls = count_seconds()

    def step(self) -> None:
        start = perf_counter()
        self._sgd.zero_grad(set_to_none=not self._keep_gradients)
        with self._autocast():
            loss = self._criterion(self._net(self._x), self._y)
        forward_ended = perf_counter()
        loss.backward()
        backward_ended = perf_counter()
        self._sgd.step()
        self._times = start, forward_ended, backward_ended, perf_counter()

    def phases(self, seconds: float) -> dict[str, float]:
        # DistributedDataParallel communicates during backward and does not report how long backward waited.
        forward, backward, update = (later - earlier for earlier, later in pairwise(self._times))
        return {"forward": forward, "backward": backward, "communication": math.nan, "update": update}

    def parameters(self) -> bytes:
        params = (param.detach() for param in self._net.parameters())
        own = (param.to_local() if hasattr(param, "to_local") else param for param in params)  # the shard of this rank
        return b"".join(param.numpy().tobytes() for param in own)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _add_hook(net: nn.parallel.DistributedDataParallel, name: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "nothing":
        net.register_comm_hook(None, lambda _, bucket: _completed(bucket.buffer()))
    elif name == "waiting":
        net.register_comm_hook(None, lambda _, bucket: _with_one_summed(bucket.buffer()))
    elif name == "fp16":
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "power-sgd":
        # The hook must not begin before DDP has rebuilt its buckets, which is in the second step.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _with_one_summed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(tensor[:1], async_op=True).get_future().then(lambda _: tensor)


def _completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
