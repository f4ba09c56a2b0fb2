"""Tensor-parallel inference on CPUs: a transformer divided among ranks computes one token after the other.

    python examples/pytorch/tensor_parallel.py                                    one rank
    torchrun --nproc-per-node 2 examples/pytorch/tensor_parallel.py               or: distopt run ...
    distopt run --nproc-per-node 2 examples/pytorch/tensor_parallel.py --backend gloo

Each rank has its share of the attention heads and of the perceptron's units (Shoeybi et al., "Megatron-LM", arXiv
1909.08053). Every layer sums over the ranks twice, a few kilobytes each time, so the time of a small all_reduce decides
how fast tokens come. The weights are random, and the same for any number of ranks; so are the tokens.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import distopt.torch  # noqa: F401 - registers the backend "distopt"

HEAD = 64  # units of an attention head


def share_of(linear: nn.Linear, dim: int, parts: int = 1) -> nn.Parameter:
    """This rank's rows (`dim` 0) or columns (1) of a weight; of each of `parts` equal parts of its rows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = [part.chunk(world_size, dim)[rank] for part in linear.weight.detach().chunk(parts)]
    return nn.Parameter(torch.cat(pieces), requires_grad=False)


class Layer(nn.Module):
    """A layer of a transformer: this rank's share of its heads and units."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        qkv, out, up, down = (
            nn.Linear(*sizes, bias=False)
            for sizes in ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
        )
        # The first weight of each pair is cut by rows, the second by columns: no sum is needed in between.
        self.qkv, self.out = share_of(qkv, 0, parts=3), share_of(out, 1)
        self.up, self.down = share_of(up, 0), share_of(down, 1)
        self.cache: list[list[torch.Tensor]] = []  # keys and values of the tokens so far

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, *entry = functional.linear(self.norms[0](x), self.qkv).view(3, -1, 1, HEAD)
        self.cache.append(entry)
        keys, values = (torch.cat(each, dim=1) for each in zip(*self.cache, strict=True))
        found = functional.scaled_dot_product_attention(query, keys, values)
        x = x + summed(functional.linear(found.reshape(1, -1), self.out))
        return x + summed(functional.linear(functional.gelu(functional.linear(self.norms[1](x), self.up)), self.down))


def summed(part: torch.Tensor) -> torch.Tensor:
    """The sum of `part` over the ranks, in its memory."""
    dist.all_reduce(part)
    return part


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["distopt", "gloo"], default="distopt")
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64 times the number of ranks (512)")
    parser.add_argument("--layers", type=int, default=24, help="(24)")
    parser.add_argument("--tokens", type=int, default=50, help="(50)")
    args = parser.parse_args()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(args.backend, **alone)
    if args.hidden % (HEAD * dist.get_world_size()):
        parser.error(f"--hidden {args.hidden} is not a multiple of {HEAD} x {dist.get_world_size()} ranks")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))

    torch.manual_seed(1)
    embedding, head = nn.Embedding(256, args.hidden), nn.Linear(args.hidden, 256, bias=False)
    layers = nn.Sequential(*(Layer(args.hidden) for _ in range(args.layers)))
    tokens, start = [1], 0.0
    for _ in range(args.tokens + 1):
        tokens.append(int(head(layers(embedding.weight[tokens[-1:]])).argmax()))
        start = start or time.perf_counter()  # after the first token, for which memory is allocated
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        print(f"Tokens: {' '.join(map(str, tokens))}")
        print(f"{dist.get_world_size()} ranks over {args.backend}: {args.tokens / seconds:.1f} tokens/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
