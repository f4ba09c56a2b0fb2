"""The reference CNN on MNIST: the model, and the training function that all launch scripts and examples/zoo share."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NoReturn

import numpy as np
from data import mnist, normalize, random_shift
from template.board import Board, show

from distopt import launch, layer, model, opt, tensor
from distopt.checkpoint import Checkpoint
from distopt.data import ShardedSampler
from distopt.device import Staging
from distopt.tensor import Tensor


class CNN(model.Model):
    """Two convolutions with pooling and two linear layers: 431,080 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        # Separate pooling layers would give the same bits; pooling in the same pass as the convolution is faster.
        self.conv1 = layer.Conv2d(20, 5, activation="RELU", pool=layer.MaxPool2d(2, 2))
        self.conv2 = layer.Conv2d(50, 5, activation="RELU", pool=layer.MaxPool2d(2, 2))
        self.flatten = layer.Flatten()
        self.linear1 = layer.Linear(500, activation="RELU")
        self.linear2 = layer.Linear(num_classes)
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return self.linear2(self.linear1(self.flatten(y)))

    def train_one_batch(
        self, x: Tensor, y: Tensor, dist_option: str = "fp32", spars: float = 0.05
    ) -> tuple[Tensor, Tensor]:
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        self.optimizer.step_by(dist_option, loss, spars=spars)
        return out, loss


def run(
    sgd: opt.DistOpt, args: argparse.Namespace, data: mnist.Digits | None = None, cnn: model.Model | None = None
) -> None:
    """Train and evaluate `cnn` (default: the CNN) on `data` (default: MNIST) on every rank; rank 0 prints."""
    rank, world_size, communicator = sgd.global_rank, sgd.world_size, sgd.communicator
    data = data or mnist.load(args.data_dir, rank=rank, exchange=communicator.all_gather_bytes)
    sampler = ShardedSampler(len(data.train_x), world_size, rank, args.batch_size, seed=args.seed)
    noise = np.random.default_rng((args.seed, rank))
    device = sgd.device
    device.SetRandSeed(args.seed)

    staging = Staging(device, ((args.batch_size, *data.train_x.shape[1:]), np.float32), ((args.batch_size,), np.int64))
    cnn = cnn or CNN()
    cnn.set_optimizer(sgd)
    cnn.compile(staging.send()[:1], is_train=True, use_graph=args.graph, sequential=False)

    sums = device.xp.zeros(2)  # loss, correct predictions; read once per epoch, because reading waits for the GPU
    checkpoint = Checkpoint(
        args.checkpoint,
        every=args.checkpoint_every,
        preemptible=True,
        model=cnn,
        optimizer=sgd,
        sampler=sampler,
        noise=noise,
        sums=sums,
    )
    if resumed := checkpoint.resume(reset=args.reset):
        report(rank, f"Resuming from {resumed}")
        sums *= resumed.world_size / world_size  # the ranks got their mean, and are added up below

    board = Board(args.tensorboard if rank == 0 else None, checkpoint.steps)
    pace, stats, on_terminal = Pace(sgd, sampler), sgd.stats(), rank == 0 and sys.stderr.isatty()
    for epoch in range(checkpoint.epoch, args.max_epoch):
        report(rank, f"Starting Epoch {epoch}:")
        start = time.perf_counter()
        cnn.train()
        sampler.set_epoch(epoch)
        before = sampler.consumed
        pace.start()
        for chosen in sampler:
            images, labels = staging.fill()
            random_shift(data.train_x[chosen], images, noise, 0 if args.no_augment else 2)
            labels[:] = data.train_y[chosen]
            x, y = staging.send()
            out, loss = cnn(x, y, args.dist_option, args.spars)
            sums[0] += loss.array[0]
            sums[1] += (out.array.argmax(axis=1) == y.array).sum()
            if (checkpoint.steps + 1) % 10 == 0 and (board.writer or on_terminal):
                figures = pace.figures(loss)
                done, speed = f"{sampler.consumed}/{sampler.size}", figures["speed/images per s"]
                show(f"Epoch {epoch} [{done}], {speed:.0f} images/s, loss={loss.item():.4f}")
                board.add(checkpoint.steps + 1, figures)
            checkpoint.step(epoch)
        if on_terminal:
            show("")
        totals = device.host(sums)
        communicator.all_reduce(totals).wait()
        seconds = time.perf_counter() - start
        accuracy = totals[1] / sampler.consumed
        report(rank, f"Training loss = {totals[0]:.6f}, training accuracy = {accuracy:.6f}{data.caveat}")
        board.add(checkpoint.steps, {"train set/accuracy": accuracy})
        sums[:] = 0

        sgd.synchronize()  # after partial updates, the parameters differ between ranks
        _, accuracy = evaluate(cnn, data, sgd, args.evaluation_batch_size)
        elapsed = time.perf_counter() - start
        report(
            rank,
            f"Evaluation accuracy = {accuracy:.6f}{data.caveat}, Elapsed Time = {elapsed:.3f}s, "
            f"{(sampler.consumed - before) / seconds:.0f} images/s",
        )
        board.add(checkpoint.steps, {"test set/accuracy": accuracy})
        if world_size > 1:
            earlier, stats = stats, sgd.stats()
            report(rank, (stats - earlier).summary())
    checkpoint.save(args.max_epoch)
    checkpoint.close()


def evaluate(cnn: model.Model, data: mnist.Digits, sgd: opt.DistOpt, batch_size: int = 500) -> tuple[float, float]:
    """Mean loss and accuracy on the whole test set; each rank evaluates a strided part."""
    cnn.eval()
    part, device = slice(sgd.global_rank, None, sgd.world_size), sgd.device
    images, labels = data.test_x[part], data.test_y[part]
    sums = np.zeros(2)  # loss, correct predictions
    for start in range(0, len(images), batch_size):
        out = device.host(cnn(tensor.from_numpy(normalize(images[start : start + batch_size]), device)).array)
        truth = labels[start : start + batch_size]
        out = out - out.max(axis=1, keepdims=True)
        sums[0] += (np.log(np.exp(out).sum(axis=1)) - out[np.arange(len(truth)), truth]).sum()
        sums[1] += (out.argmax(axis=1) == truth).sum()
    sgd.communicator.all_reduce(sums).wait()
    loss, accuracy = sums / len(data.test_x)
    return float(loss), float(accuracy)


class Pace:
    """Speed and communication of an epoch's steps, for TensorBoard."""

    def __init__(self, sgd: opt.DistOpt, sampler: ShardedSampler) -> None:
        self._sgd, self._sampler = sgd, sampler
        self.start()

    def start(self) -> None:
        self._done, self._since, self._stats = self._sampler.consumed, time.perf_counter(), self._sgd.stats()

    def figures(self, loss: Tensor) -> dict[str, float]:
        """Of the steps since the last call, and the last of their losses."""
        done, since, stats = self._done, self._since, self._stats
        self.start()
        steps, total = max((self._stats - stats).steps, 1), (self._stats - stats).total
        return {
            "train/loss": loss.item(),
            "train/learning rate": self._sgd.opt.lr_value.item(),
            "speed/images per s": (self._done - done) / (self._since - since),
            "speed/bytes per step": total.wire_bytes / steps,
            "speed/ms of waiting per step": total.comm_seconds / steps * 1000,
        }


def report(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


class OneLineParser(argparse.ArgumentParser):
    """Prints an error once, on rank 0, without the usage text."""

    def error(self, message: str) -> NoReturn:
        info = launch.launcher()
        quiet = info is not None and info.rank > 0
        self.exit(2, None if quiet else f"{self.prog}: error: {message} (see --help)\n")


def board_folder(text: str) -> str:
    """The type of an option that names a folder for TensorBoard."""
    if find_spec("tensorboardX") is None:
        raise argparse.ArgumentTypeError("tensorboardX is not installed; pip install tensorboardX tensorboard")
    return text


def at_least(low: int) -> Callable[[str], int]:
    """The type of an option that is a whole number of at least `low`."""

    def read(text: str) -> int:
        if (number := int(text)) < low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low}")
        return number

    read.__name__ = "int"  # of argparse's message for other text
    return read


def parse_args(
    description: str | None,
    argv: Sequence[str] | None = None,
    *,
    with_world_size: bool = False,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """Parse the options shared by the launch scripts, and those that `add_options(parser)` adds."""
    parser = OneLineParser(description=description)
    if with_world_size:
        parser.add_argument("world_size", type=int, metavar="WORLD_SIZE", help="number of processes")
    parser.add_argument("-m", "--max-epoch", type=at_least(0), default=10)
    parser.add_argument("-b", "--batch-size", type=at_least(1), default=64, help="samples per rank and step")
    parser.add_argument("-l", "--learning-rate", type=float, default=0.005)
    parser.add_argument("-d", "--dist-option", default="fp32", choices=opt.DIST_OPTIONS, help="what is sent")
    parser.add_argument("-s", "--spars", type=float, default=0.05, help="sparsity, for the sparse options")
    parser.add_argument("--data-dir", help="folder with MNIST's four files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graph", action="store_true", help="on GPUs, replay training steps as CUDA graphs")
    parser.add_argument("--no-augment", action="store_true", help="do not shift the training images")
    parser.add_argument("--checkpoint", metavar="DIR", help="save here, and go on from what was saved here last")
    parser.add_argument("--checkpoint-every", type=at_least(1), default=100, metavar="STEPS", help="(default: 100)")
    parser.add_argument("--tensorboard", type=board_folder, metavar="DIR", help="write for TensorBoard")
    parser.add_argument("--reset", action="store_true", help="remove what is in the folder of --checkpoint; start anew")
    parser.set_defaults(evaluation_batch_size=500)
    if add_options:
        add_options(parser)
    args = parser.parse_args(argv)
    if args.reset and not args.checkpoint:
        parser.error("--reset needs --checkpoint DIR")
    return args
