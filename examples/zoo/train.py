"""Train a network of the zoo on MNIST, on CIFAR-10's files or on synthetic images:

python examples/zoo/train.py --np 2 --model resnet18 --data cifar10 --data-dir cifar-10-batches-bin
distopt run --nproc-per-node 2 examples/zoo/train.py --model xceptionnet -d sparseTopK --checkpoint runs/a
mpiexec --hostfile examples/hosts python examples/zoo/train.py --model resnet50 --image-size 224
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_cnn
from data import mnist
from zoo import models

from distopt import launch, layer, opt
from distopt.errors import DataError

CLASSES = 10
_CIFAR_BYTES = 1 + 3 * 32 * 32  # label and image, channels first


def cifar10(folder) -> SimpleNamespace:
    """CIFAR-10 from its binary version: data_batch_1.bin to data_batch_5.bin, and test_batch.bin."""
    parts = {}
    for part, names in {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}.items():
        rows = []
        for name in names:
            path = Path(folder or ".", name)
            try:
                content = np.fromfile(path, np.uint8)
            except OSError as error:
                raise DataError(
                    f"{path}: {error.strerror}; --data-dir is the folder of CIFAR-10's binary version"
                ) from None
            if not content.size or content.size % _CIFAR_BYTES:
                raise DataError(f"{path} has {content.size} bytes, which are no images of {_CIFAR_BYTES} bytes")
            rows.append(content.reshape(-1, _CIFAR_BYTES))
        rows = np.concatenate(rows)
        parts[f"{part}_x"], parts[f"{part}_y"] = rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int32)
    return SimpleNamespace(**parts, caveat="")


def synthetic(count: int, size: int) -> SimpleNamespace:
    """Images [count, 3, size, size] that can be learnt: a pattern for each class, in noise; and a quarter to test."""
    rng = np.random.default_rng(5)
    edge = -(-size // 4)  # of one colour: training shifts images by some pixels
    patterns = rng.integers(0, 128, (CLASSES, 3, 4, 4), np.uint8)
    patterns = patterns.repeat(edge, 2).repeat(edge, 3)[..., :size, :size]

    def images(number: int):
        labels = rng.integers(0, CLASSES, number, np.int32)
        return patterns[labels] + rng.integers(0, 128, (number, 3, size, size), np.uint8), labels

    (train_x, train_y), (test_x, test_y) = images(count), images(max(count // 4, 1))
    caveat = " (synthetic images)"
    return SimpleNamespace(train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y, caveat=caveat)


def train(args) -> None:
    sgd = opt.DistOpt(opt.SGD(lr=args.learning_rate, momentum=0.9, weight_decay=1e-5))
    if args.data == "mnist":
        data = mnist.load(args.data_dir, rank=sgd.global_rank, exchange=sgd.communicator.all_gather_bytes)
    else:
        data = cifar10(args.data_dir) if args.data == "cifar10" else synthetic(args.images, args.image_size)
    norm = layer.SyncBatchNorm2d if args.sync_batch_norm else layer.BatchNorm2d
    net = models.build(args.model, CLASSES, data.train_x.shape[2], norm)
    net.half = args.precision == "float16"
    train_cnn.run(sgd, args, data, net)


def train_rank(rank, world_size, args) -> None:
    """As a process that this script has started: `opt.DistOpt` finds its place by itself."""
    del rank, world_size
    train(args)


def add_options(parser) -> None:
    parser.add_argument("--np", type=int, metavar="N", help="start so many processes (default: as the launcher has)")
    parser.add_argument("--model", choices=models.MODELS, default="resnet18")
    parser.add_argument("--data", choices=["mnist", "cifar10", "synthetic"], default="synthetic")
    parser.add_argument("--images", type=int, default=1024, metavar="N", help="of synthetic data (1024)")
    parser.add_argument("--image-size", type=int, default=32, metavar="S", help="of synthetic data (32)")
    parser.add_argument("--precision", choices=["float32", "float16"], default="float32", help="of activations")
    parser.add_argument("--sync-batch-norm", action="store_true", help="normalize by the images of all ranks")
    parser.set_defaults(evaluation_batch_size=32)


if __name__ == "__main__":
    args = train_cnn.parse_args(__doc__, add_options=add_options)
    if args.np:
        launch.main(train_rank, args.np, (args,))
    else:
        launch.main(train, args=(args,))
