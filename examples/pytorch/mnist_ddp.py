"""A CNN on MNIST with PyTorch's DistributedDataParallel, over distopt, Gloo or NCCL.

    python examples/pytorch/mnist_ddp.py                                          one rank
    torchrun --nproc-per-node 2 examples/pytorch/mnist_ddp.py                     or: distopt run ...
    MASTER_ADDR=localhost MASTER_PORT=29500 mpiexec -n 2 python examples/pytorch/mnist_ddp.py
    sbatch --nodes=2 examples/slurm/pytorch.sbatch

On each of two nodes, by torchrun or by hand:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/pytorch/mnist_ddp.py
    python examples/pytorch/mnist_ddp.py --init-method tcp://HOST:29500 --world-size 2 --rank 0         (or 1)

With `--checkpoint DIR` it resumes where it was interrupted, and leaves in time when it is preempted.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from distopt.torch import Checkpoint, ResumableSampler  # registers the backend "distopt", too

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import mnist
from template.board import Board, Pace, show

# Where torchrun and `distopt run`, Open MPI, MPICH and srun say which rank this is, and of how many.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Dropout(0.3), nn.Linear(500, 10)),
    )


def shifted(images: torch.Tensor, pixels: int = 2) -> torch.Tensor:
    """Each of the images [n, 1, height, width] moved by up to so many pixels in each direction."""
    n, _, height, width = images.shape
    rows, columns = (torch.randint(2 * pixels + 1, (n, 1)) + torch.arange(size) for size in (height, width))
    padded = functional.pad(images, [pixels] * 4)
    return padded[torch.arange(n)[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None]


def normalized(images: torch.Tensor) -> torch.Tensor:
    return (images / 255 - 0.1307) / 0.3081


def train(args, epoch, model, optimizer, batches, checkpoint, device, board, pace) -> None:
    model.train()
    sampler, shown = batches.batch_sampler, ""
    sampler.set_epoch(epoch)
    pace.start()
    for images, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(normalized(shifted(images)).to(device)), labels.to(device))
        loss.backward()
        pace.end_backward()
        optimizer.step()
        if args.rank == 0:
            done = sampler.consumed + pace.images
            progress = f"Epoch: {epoch + 1} [{done}/{sampler.size} ({done / sampler.size:.0%})]"
            show(f"{progress}, {pace.speed():.0f} images/s{shown}")
            if (checkpoint.steps + 1) % args.log_interval == 0:
                shown = f", loss={loss.item():.4f}"
                show("")
                print(f"Train {progress}\tLoss: {loss.item():.6f}", flush=True)
                figures = {"train/loss": loss.item(), "train/learning rate": optimizer.param_groups[0]["lr"]}
                board.add(checkpoint.steps + 1, {**figures, **pace.figures()})
        checkpoint.step(epoch)  # saves every few steps; this is where a preempted job leaves
    if args.rank == 0:
        show("")


@torch.no_grad()
def evaluate(args, model, test, device, caveat) -> float:
    """Print loss and accuracy on all test images, a share on each rank; return the accuracy."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(args.rank * 500, len(test), args.world_size * 500):
        images, labels = test[start : start + 500]
        outputs, labels = model(normalized(images).to(device)), labels.to(device)
        sums[0] += functional.cross_entropy(outputs, labels, reduction="sum")
        sums[1] += (outputs.argmax(1) == labels).sum()
    dist.all_reduce(sums)
    loss, correct = sums.tolist()
    score = f"Average loss: {loss / len(test):.4f}, Accuracy: {correct:.0f}/{len(test)} ({correct / len(test):.2%})"
    if args.rank == 0:
        print(f"Test set: {score}{caveat}", flush=True)
    return correct / len(test)


def digest(model: nn.Module) -> str:
    """Of all bits of the parameters: two jobs with the same one have computed the same."""
    bits = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(bits).hexdigest()[:16]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["distopt", "gloo", "nccl"], default="distopt")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step (64)")
    parser.add_argument("--lr", type=float, default=0.03, help="times the root of the number of ranks (0.03)")
    parser.add_argument("--log-interval", type=int, default=10, metavar="STEPS")
    parser.add_argument("--data", metavar="DIR", help="where MNIST is (default: as examples/data/mnist.py says)")
    parser.add_argument("--checkpoint", metavar="DIR", help="save here, and go on from what was saved here last")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="(100)")
    parser.add_argument("--tensorboard", metavar="DIR", help="write for TensorBoard")
    parser.add_argument("--timeline", metavar="DIR", help="write a timeline of each rank; see distopt timeline --help")
    parser.add_argument("--digest", action="store_true", help="print a digest of the parameters at the end")
    rank, world_size = next(((os.environ[r], os.environ[n]) for r, n in LAUNCHERS if r in os.environ), ("0", "1"))
    parser.add_argument("--rank", type=int, default=rank, help="(default: as the launcher says)")
    parser.add_argument("--world-size", type=int, default=world_size, help="(default: as the launcher says)")
    parser.add_argument("--init-method", help="tcp://HOST:PORT of rank 0 (default: MASTER_ADDR and MASTER_PORT)")
    args = parser.parse_args()
    if args.tensorboard and find_spec("tensorboardX") is None:
        parser.error("--tensorboard: tensorboardX is not installed; pip install tensorboardX tensorboard")
    if args.timeline:
        os.environ["DISTOPT_TIMELINE"] = args.timeline
    return args


def main() -> None:
    args = parse_args()
    device = torch.device("cpu")
    if args.backend == "nccl":
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", args.rank)))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # One rank needs no address.
    place = {"store": dist.HashStore()} if args.world_size == 1 else {"init_method": args.init_method}
    dist.init_process_group(args.backend, rank=args.rank, world_size=args.world_size, **place)
    there = f"there are {os.environ.get('SLURM_GPUS_ON_NODE', '0')} allocated GPUs per node"
    print(f"Hello from rank {args.rank} of {args.world_size} on {socket.gethostname()} where {there}.", flush=True)

    torch.manual_seed(1)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.world_size))
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), args.lr * args.world_size**0.5, momentum=0.9, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    digits = mnist.load(args.data, rank=args.rank)
    train_data, test_data = (
        TensorDataset(torch.from_numpy(images), torch.from_numpy(labels).long())
        for images, labels in ((digits.train_x, digits.train_y), (digits.test_x, digits.test_y))
    )
    sampler = ResumableSampler(train_data, args.batch_size, seed=1)
    batches = DataLoader(train_data, batch_sampler=sampler)
    torch.manual_seed(1000 + args.rank)  # other shifts, and other units dropped, on every rank

    checkpoint = Checkpoint(
        args.checkpoint,
        every=args.checkpoint_every,
        preemptible=True,  # on a signal, save, have Slurm queue the job again, and leave
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        sampler=sampler,
    )
    if (resumed := checkpoint.resume()) and args.rank == 0:
        print(f"Resuming from {resumed}", flush=True)
    board, pace = Board(args.tensorboard if args.rank == 0 else None, checkpoint.steps), Pace(model, args.batch_size)
    for epoch in range(checkpoint.epoch, args.epochs):
        train(args, epoch, model, optimizer, batches, checkpoint, device, board, pace)
        schedule.step()
        accuracy = evaluate(args, model.module, test_data, device, digits.caveat)
        board.add(checkpoint.steps, {"test set/accuracy": accuracy})
        checkpoint.save(epoch + 1)
    checkpoint.close()
    if args.digest and args.rank == 0:
        print(f"Digest of the parameters: {digest(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
