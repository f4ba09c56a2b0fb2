"""DDP with much memory: so many megabytes of parameters, with Adam, and of each rank's own states.

distopt run --heal --nproc-per-node 1 -m instruments.torch.large --model-mb 500 --own-mb 5

It prints as `instruments.torch.elastic` does.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distopt.torch
from instruments.faults.healed import come, end, options
from instruments.torch.resumed import digest

WIDTH = 1000


class Residual:
    """A rank's own states."""

    def __init__(self, n_bytes: int) -> None:
        self.values = torch.zeros(n_bytes // 4)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"values": self.values}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        self.values.copy_(states["values"])


class Wide(nn.Module):
    """Matrices of 4 MB."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__()
        count = max(1, n_bytes // (4 * WIDTH * WIDTH))
        self.parts = nn.ParameterList(torch.full((WIDTH, WIDTH), 0.01) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part @ x - 1).square().mean() for part in self.parts)


def main() -> None:
    parser = options(pause=0.1)
    parser.add_argument("--model-mb", type=int, default=4)
    parser.add_argument("--own-mb", type=int, default=0)
    parser.add_argument("--backend", default="distopt")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    torch.set_num_threads(1)
    net = DistributedDataParallel(Wide(1_000_000 * args.model_mb))
    adam = torch.optim.Adam(net.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(rank)
    parts = {"model": net, "optimizer": adam, "generator": generator}
    if args.own_mb:
        parts["residual"] = residual = Residual(1_000_000 * args.own_mb)
    checkpoint = distopt.torch.Checkpoint(None, **parts)
    come(checkpoint, rank, dist.get_world_size())
    while checkpoint.steps < args.steps:
        adam.zero_grad(set_to_none=False)
        net(torch.rand(WIDTH, generator=generator)).backward()
        if args.own_mb:
            residual.values.add_(rank + 1)
        adam.step()
        end(args, checkpoint, rank, 0)
    checkpoint.close()
    print(f"ends with {digest(net, adam, *([residual] if args.own_mb else []))}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
