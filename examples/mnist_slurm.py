"""Train the CNN on MNIST under Slurm: sbatch examples/slurm/two_nodes.sbatch"""

from __future__ import annotations

import os
import socket

import numpy as np
import train_cnn
from data import mnist, normalize, random_shift
from template.board import Board

import distopt
from distopt import launch, opt, tensor
from distopt.checkpoint import Checkpoint
from distopt.data import ShardedSampler


def train_mnist(args) -> None:
    world = distopt.init()
    rank, world_size, host = world.rank, world.world_size, socket.gethostname()
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    there = f"on {host} where there are {gpus} allocated GPUs per node."
    print(f"Hello from rank {rank} of {world_size} {there}", flush=True)
    train_cnn.report(rank, f"Group initialized? {not world.closed}")
    print(f"host: {host}, rank: {rank}, local_rank: {world.local_rank}", flush=True)

    data = mnist.load(args.data_dir, rank=rank, exchange=world.communicator.all_gather_bytes)
    sampler = ShardedSampler(len(data.train_x), world_size, rank, args.batch_size, seed=args.seed)
    noise = np.random.default_rng((args.seed, rank))
    sgd = opt.DistOpt(opt.SGD(lr=step_decay(args, len(sampler)), momentum=0.9, weight_decay=1e-5))
    sgd.device.SetRandSeed(args.seed)
    cnn = train_cnn.CNN()
    cnn.set_optimizer(sgd)
    sample = tensor.from_numpy(normalize(data.train_x[: args.batch_size]), sgd.device)
    cnn.compile([sample], is_train=True, use_graph=False, sequential=False)

    checkpoint = Checkpoint(
        args.checkpoint,
        every=args.checkpoint_every,
        preemptible=True,  # on a signal, save, have Slurm queue the job again, and leave
        model=cnn,
        optimizer=sgd,
        sampler=sampler,
        noise=noise,
    )
    if resumed := checkpoint.resume():
        train_cnn.report(rank, f"Resuming from {resumed}")
    board = Board(args.tensorboard if rank == 0 else None, checkpoint.steps)
    for epoch in range(checkpoint.epoch, args.epochs):
        train_epoch(args, epoch, cnn, data, sampler, noise, checkpoint, board, rank)
        loss, accuracy = train_cnn.evaluate(cnn, data, sgd)
        total = len(data.test_x)
        score = f"Average loss: {loss:.4f}, Accuracy: {accuracy * total:.0f}/{total} ({accuracy:.0%})"
        train_cnn.report(rank, f"\nTest set: {score}{data.caveat}\n")
        board.add(checkpoint.steps, {"test set/accuracy": accuracy})
        checkpoint.save(epoch + 1)
    checkpoint.close()


def train_epoch(args, epoch, cnn, data, sampler, noise, checkpoint, board, rank) -> None:
    cnn.train()
    sampler.set_epoch(epoch)
    pace = train_cnn.Pace(cnn.optimizer, sampler)
    images = np.empty((args.batch_size, *data.train_x.shape[1:]), np.float32)
    for chosen in sampler:
        random_shift(data.train_x[chosen], images, noise, 2)
        x, y = (tensor.from_numpy(array, cnn.optimizer.device) for array in (images, data.train_y[chosen]))
        _, loss = cnn(x, y)
        if rank == 0 and (checkpoint.steps + 1) % args.log_interval == 0:
            done, total = sampler.consumed, len(data.train_x)
            progress = f"Train Epoch: {epoch + 1} [{done}/{total} ({done / total:.0%})]"
            print(f"{progress}\tLoss: {loss.item():.6f}", flush=True)
            board.add(checkpoint.steps + 1, pace.figures(loss))
        checkpoint.step(epoch)  # where the job may end


def step_decay(args, steps_per_epoch: int) -> opt.StepDecay:
    """The learning rate falls by a factor after each epoch."""
    epochs = range(1, args.epochs)
    return opt.StepDecay(args.learning_rate, [epoch * steps_per_epoch for epoch in epochs], args.gamma)


def parse_args(argv=None):
    parser = train_cnn.OneLineParser(description=__doc__)
    parser.add_argument("-e", "--epochs", type=int, default=14)
    parser.add_argument("-b", "--batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("-l", "--learning-rate", type=float, default=0.02)
    parser.add_argument("--gamma", type=float, default=0.7, help="factor of the learning rate from epoch to epoch")
    parser.add_argument("--log-interval", type=int, default=10, metavar="STEPS")
    parser.add_argument("--data-dir", help="folder with MNIST's four files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", metavar="DIR", help="save here, and go on from what was saved here last")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="(default: 100)")
    parser.add_argument("--tensorboard", type=train_cnn.board_folder, metavar="DIR", help="write for TensorBoard")
    parser.add_argument("--timeline", metavar="DIR", help="write a timeline of each rank; see distopt timeline --help")
    args = parser.parse_args(argv)
    if args.timeline:
        os.environ["DISTOPT_TIMELINE"] = args.timeline
    return args


if __name__ == "__main__":
    launch.main(train_mnist, args=(parse_args(),))
