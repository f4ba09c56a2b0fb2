"""One rank of a transformer that is divided among ranks, and computes one token at a time, as inference does.

Each rank has its share of the attention heads and of the perceptron's units (Shoeybi et al., "Megatron-LM", arXiv
1909.08053), so each layer ends two of its products with a sum over the ranks. The sums go over Gloo or over distopt, or
are left out.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from .libraries import join_torch
from .phases import count_seconds

HEAD, CONTEXT = 64, 128  # units of a head; tokens that the cache holds


class Layer:
    """A layer's share of one rank: random weights and a full cache of keys and values."""

    def __init__(self, hidden: int, world_size: int, random: torch.Generator) -> None:
        share = hidden // world_size

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=random) * columns**-0.5

        self.qkv, self.out = weight(3 * share, hidden), weight(hidden, share)
        self.up, self.down = weight(4 * share, hidden), weight(hidden, 4 * share)
        self.keys, self.values = torch.randn(2, share // HEAD, CONTEXT, HEAD, generator=random)

    def forward(self, x: torch.Tensor, add: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """The result for `x` [1, hidden]; `add` replaces a tensor by its sum over the ranks."""
        query, key, value = functional.linear(normalized(x), self.qkv).view(3, -1, 1, HEAD)
        self.keys[:, -1:], self.values[:, -1:] = key, value
        found = functional.scaled_dot_product_attention(query, self.keys, self.values)
        part = functional.linear(found.reshape(1, -1), self.out)
        add(part)
        x = x + part
        part = functional.linear(functional.relu(functional.linear(normalized(x), self.up)), self.down)
        add(part)
        return x + part


def normalized(x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def prepare(setup: dict[str, Any], rank: int, world_size: int) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Collective. A description of this rank, and a function that computes tokens.

    "layers" and "hidden" of the setup are the size of the transformer. With "profile", the phases of sums over distopt are
    recorded.
    """
    rank = join_torch(setup, rank, world_size)
    gloo = dist.new_group(backend="gloo")
    sums = {"nothing": lambda _: None, "gloo": partial(dist.all_reduce, group=gloo), "distopt": dist.all_reduce}
    random = torch.Generator().manual_seed(rank)
    layers = [Layer(setup["hidden"], world_size, random) for _ in range(setup["layers"])]
    inputs = torch.randn(16, 1, setup["hidden"], generator=torch.Generator().manual_seed(99))
    phases = count_seconds() if setup.get("profile") else dict
    return {"rank": rank, "about": f"torch {torch.__version__}"}, partial(measure, layers, inputs, sums, phases)


@torch.inference_mode()
def measure(
    layers: list[Layer],
    inputs: torch.Tensor,
    sums: dict[str, Callable[..., object]],
    phases: Callable[[], dict[str, float]],
    request: dict[str, Any],
) -> dict[str, Any]:
    """Collective. Time "tokens" tokens, after "warm_up" untimed ones, with sums "over" one of `sums`.

    "spans" of the answer has for each token what it has in `train.measure`.
    """
    add, seconds, spans, digest = sums[request["over"]], [], [], hashlib.sha256()
    for number in range(request["warm_up"] + request["tokens"]):
        dist.barrier()
        phases()
        used, start = time.process_time(), time.perf_counter()
        x = inputs[number % len(inputs)]
        for layer in layers:
            x = layer.forward(x, add)
        seconds.append(time.perf_counter() - start)
        spent = phases() if request["over"] == "distopt" else {}
        spans.append({"begin": start, "cpu": time.process_time() - used, **spent})
        digest.update(x.numpy().tobytes())
    timed = slice(request["warm_up"], None)
    return {"seconds": seconds[timed], "spans": spans[timed], "bits": digest.hexdigest()[:16]}
