"""The reference CNN on MNIST: the model, and the training function that all launch scripts and examples/zoo share."""

from __future__ import annotations

import argparse
import os
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
    data = data or mnist.load(args.data_dir, rank=sgd.global_rank, exchange=sgd.communicator.all_gather_bytes)
    training = Training(sgd, args, data, cnn or CNN())
    for epoch in range(training.checkpoint.epoch, args.max_epoch):
        training.run_epoch(epoch)
    training.checkpoint.save(args.max_epoch)
    training.checkpoint.close()


LOG_SECONDS = 5.0  # between two lines of progress where there is no terminal


class Training:
    """The training of a model on this rank's part of the data, resumed from a checkpoint if there is one."""

    def __init__(self, sgd: opt.DistOpt, args: argparse.Namespace, data: mnist.Digits, cnn: model.Model) -> None:
        self.sgd, self.args, self.data, self.cnn = sgd, args, data, cnn
        self.rank, world_size = sgd.global_rank, sgd.world_size
        self.sampler = ShardedSampler(len(data.train_x), world_size, self.rank, args.batch_size, seed=args.seed)
        self.noise = np.random.default_rng((args.seed, self.rank))
        device = sgd.device
        device.SetRandSeed(args.seed)

        images, labels = ((args.batch_size, *data.train_x.shape[1:]), np.float32), ((args.batch_size,), np.int64)
        self.staging = Staging(device, images, labels)
        cnn.set_optimizer(sgd)
        cnn.compile(self.staging.send()[:1], is_train=True, use_graph=args.graph, sequential=False)

        # Loss and correct predictions; read once per epoch, because reading waits for the GPU.
        self.sums = device.xp.zeros(2)
        self.checkpoint = Checkpoint(
            args.checkpoint,
            every=args.checkpoint_every,
            preemptible=True,
            model=cnn,
            optimizer=sgd,
            sampler=self.sampler,
            noise=self.noise,
            sums=self.sums,
        )
        if resumed := self.checkpoint.resume(reset=args.reset):
            report(self.rank, f"Resuming from {resumed}")
            self.sums *= resumed.world_size / world_size  # the ranks got their mean, and are added up at the end

        self.board = Board(args.tensorboard if self.rank == 0 else None, self.checkpoint.steps)
        self.on_terminal = self.rank == 0 and sys.stderr.isatty()
        self.pace, self.stats = Pace(sgd, self.sampler), sgd.stats()

    def run_epoch(self, epoch: int) -> None:
        """Train for one epoch, evaluate, and report."""
        sgd, sampler, rank, caveat = self.sgd, self.sampler, self.rank, self.data.caveat
        report(rank, f"Starting Epoch {epoch}:")
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        before = sampler.consumed
        loss, correct = self.train(epoch)
        seconds = time.perf_counter() - start
        accuracy = correct / sampler.consumed
        report(rank, f"Training loss = {loss:.6f}, training accuracy = {accuracy:.6f}{caveat}")
        self.board.add(self.checkpoint.steps, {"train set/accuracy": accuracy})

        sgd.synchronize()  # after partial updates, the parameters differ between ranks
        _, accuracy = evaluate(self.cnn, self.data, sgd, self.args.evaluation_batch_size)
        elapsed = time.perf_counter() - start
        report(
            rank,
            f"Evaluation accuracy = {accuracy:.6f}{caveat}, Elapsed Time = {elapsed:.3f}s, "
            f"{(sampler.consumed - before) / seconds:.0f} images/s",
        )
        self.board.add(self.checkpoint.steps, {"test set/accuracy": accuracy})
        if sgd.world_size > 1:
            earlier, self.stats = self.stats, sgd.stats()
            report(rank, (self.stats - earlier).summary())

    def train(self, epoch: int) -> tuple[float, float]:
        """Train on the rest of the epoch; return loss and correct predictions, summed over all ranks."""
        data, sums, checkpoint = self.data, self.sums, self.checkpoint
        self.cnn.train()
        self.pace.start()
        due = time.perf_counter() + LOG_SECONDS
        for chosen in self.sampler:
            images, labels = self.staging.fill()
            random_shift(data.train_x[chosen], images, self.noise, 0 if self.args.no_augment else 2)
            labels[:] = data.train_y[chosen]
            x, y = self.staging.send()
            out, loss = self.cnn(x, y, self.args.dist_option, self.args.spars)
            sums[0] += loss.array[0]
            sums[1] += (out.array.argmax(axis=1) == y.array).sum()
            if (checkpoint.steps + 1) % 10 == 0 and (self.board.writer or self.on_terminal):
                self.show(epoch, loss)
            elif self.rank == 0 and not self.on_terminal and time.perf_counter() > due:
                due = time.perf_counter() + LOG_SECONDS
                print(self.line(epoch, loss, self.pace.figures(loss)), file=sys.stderr, flush=True)
            checkpoint.step(epoch)
        if self.on_terminal:
            show("")
        totals = self.sgd.device.host(sums)
        self.sgd.communicator.all_reduce(totals).wait()
        loss_sum, correct = totals.tolist()
        sums[:] = 0
        return loss_sum, correct

    def show(self, epoch: int, loss: Tensor) -> None:
        """Show the progress on the terminal, and write it for TensorBoard."""
        figures = self.pace.figures(loss)
        if self.on_terminal:
            show(self.line(epoch, loss, figures))
        self.board.add(self.checkpoint.steps + 1, figures)

    def line(self, epoch: int, loss: Tensor, figures: dict[str, float]) -> str:
        done, speed = f"{self.sampler.consumed}/{self.sampler.size}", figures["speed/images per s"]
        return f"Epoch {epoch} [{done}], {speed:.0f} images/s, loss={loss.item():.4f}"


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
    parser.add_argument("--timeline", metavar="DIR", help="write a timeline of each rank; see distopt timeline --help")
    parser.add_argument("--reset", action="store_true", help="remove what is in the folder of --checkpoint; start anew")
    parser.set_defaults(evaluation_batch_size=500)
    if add_options:
        add_options(parser)
    args = parser.parse_args(argv)
    if args.reset and not args.checkpoint:
        parser.error("--reset needs --checkpoint DIR")
    if args.timeline:
        os.environ["DISTOPT_TIMELINE"] = args.timeline  # of the processes that start from here, too
    return args
